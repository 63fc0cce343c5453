// The text while it is written. One element for a run of tokens of one writer; what it says is text, never HTML.

import { make } from "./dom.js";

/** Runs that keep their colour; those before them are joined. */
const MOST_RUNS = 3000;

export class Words {
  #last = null;
  #isDraft = null;
  #frame = 0;

  constructor(title) {
    this.element = make("p", { class: "words", tabindex: "0", role: "region", "aria-label": `Text: ${title}` });
  }

  add(piece, isDraft) {
    if (!piece) return;
    if (this.#last && this.#isDraft === isDraft) {
      this.#last.firstChild.appendData(piece);
    } else {
      this.#last = make("span", { class: isDraft ? "by-draft" : "by-target", title: isDraft ? "written by the draft" : "written by the target" }, piece);
      this.#isDraft = isDraft;
      this.element.append(this.#last);
    }
    if (this.element.childElementCount > MOST_RUNS) this.#join();
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.element.scrollTop = this.element.scrollHeight; // asks for the layout, so once a frame
    });
  }

  /** The older half in one piece. */
  #join() {
    const old = [...this.element.children].slice(0, MOST_RUNS / 2);
    const joined = make("span", {}, old.map((run) => run.textContent).join(""));
    old[0].before(joined);
    for (const run of old) run.remove();
  }
}
