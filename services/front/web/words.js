// The text while it is written. One element for a run of tokens of one writer; what it says is text, never HTML.

import { make } from "./dom.js";

/** A block ends behind a sentence once it has so many characters, or behind any word once it has twice as many: what is added
 * then moves only the last block, however long the text is. */
const LONG_BLOCK = 1200;
/** Blocks that keep their colours. */
const MOST_COLOURED = 30;

export class Words {
  #block = null;
  #run = null;
  #isDraft = null;
  #length = 0;
  #frame = 0;

  constructor(title) {
    this.element = make("div", { class: "words", tabindex: "0", role: "region", "aria-label": `Text: ${title}` });
  }

  add(piece, isDraft) {
    if (!piece) return;
    if (!this.#block) this.#open();
    if (this.#run && this.#isDraft === isDraft) {
      this.#run.firstChild.appendData(piece);
    } else {
      this.#run = make("span", { class: isDraft ? "by-draft" : "by-target", title: isDraft ? "written by the draft" : "written by the target" }, piece);
      this.#isDraft = isDraft;
      this.#block.append(this.#run);
    }
    this.#length += piece.length;
    const enough = /[.!?\n]\s*$/.test(piece) ? LONG_BLOCK : 2 * LONG_BLOCK;
    if (this.#length >= enough && /[\s.!?]$/.test(piece)) this.#block = null;
    this.#scroll();
  }

  #open() {
    this.#block = make("p");
    this.#run = null;
    this.#length = 0;
    this.element.append(this.#block);
    const old = this.element.children[this.element.childElementCount - 1 - MOST_COLOURED];
    if (old) old.textContent = old.textContent; // the same without its runs
  }

  #scroll() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.element.scrollTop = this.element.scrollHeight; // asks for the layout, so once a frame
    });
  }
}
