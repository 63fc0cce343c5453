// One caption while it is made: what is asked, what comes back, and what there is to see of it.

import { Away, events, send, untilReady } from "./api.js";
import { make, share } from "./dom.js";
import { Marks } from "./marks.js";
import { Timeline } from "./timeline.js";
import { Words } from "./words.js";

/** A caption that its server loses is asked for so often in all. */
const MOST_TRIES = 5;
const STAGES = {
  receive: "the gateway receives",
  queued: "waits for a place",
  decode: "frames are decoded",
  encode: "frames are encoded",
  prefill: "the prompt is read",
  generate: "the target writes",
  resume: "the target was lost; waiting for another",
};
const now = () => performance.now() / 1000;

export class Run {
  #tries = 0;

  /** What is there by now, and whether that is all. */
  text = "";
  isWhole = false;

  /** `onKept` hears which video tokens the draft keeps; null when the caption begins. */
  constructor(title, drafted, onKept) {
    this.title = title;
    this.drafted = drafted;
    this.onKept = onKept;
    this.stage = make("p", { class: "stage", role: "status" });
    this.result = make("p", { class: "result" });
    this.body = make("div");
    this.element = make("section", { class: "run", "aria-label": title }, make("h2", {}, title), this.stage, this.body, this.result);
  }

  /** To the end of the caption. `body` is the request. Never throws but when `signal` ends it. */
  async go(body, signal) {
    for (;;) {
      this.#fresh();
      try {
        await this.#once(body, signal);
        return;
      } catch (error) {
        this.marks.end(now());
        this.timeline.changed();
        if (error.name === "AbortError") {
          this.stage.textContent = "stopped";
          throw error;
        }
        if (!(error instanceof Away) || ++this.#tries >= MOST_TRIES) {
          this.stage.textContent = "";
          this.result.replaceChildren(make("span", { class: "bad" }, error.message));
          return;
        }
        this.stage.textContent = `${error.message}; it is asked for anew when the server is back`;
        await untilReady(signal);
      }
    }
  }

  close() {
    this.timeline?.close();
  }

  #fresh() {
    this.close();
    this.marks = new Marks(now(), this.drafted);
    this.timeline = new Timeline(this.marks, this.title);
    this.words = new Words(this.title);
    this.pages = 0;
    this.text = "";
    this.onKept(null);
    this.body.replaceChildren(this.words.element, this.timeline.element);
    this.result.replaceChildren();
    this.stage.textContent = "sent";
  }

  async #once(body, signal) {
    const headers = { "content-type": "application/json" };
    const response = await send("/v1/chat/completions", { method: "POST", headers, body, signal });
    for await (const chunk of events(response)) {
      if (chunk.slipstream && !chunk.choices.length) this.#hear(chunk.slipstream);
      else if (chunk.timings) this.#finish(chunk);
    }
  }

  #hear(said) {
    this.marks.add(said, now());
    if (said.tokens) for (const [piece, isDraft] of said.tokens) this.#write(piece, isDraft);
    else if (said.kept) this.onKept(said.kept);
    else if (said.page) this.#page(said.page);
    else if (said.stage) this.#tell(said.stage);
    this.timeline.changed();
  }

  #write(piece, isDraft) {
    this.text += piece;
    this.words.add(piece, isDraft);
  }

  #page({ page }) {
    this.pages += 1;
    if (this.pages > 1) this.words.add("\n\n", false);
    this.stage.textContent = `page ${page}`;
  }

  #tell({ stage, done, total, detail }) {
    if (stage === "draft_lost" || stage === "draft_missing") {
      this.result.replaceChildren(make("span", { class: "soft" }, `without a draft: ${detail || stage}`));
    } else if (STAGES[stage]) {
      this.stage.textContent = STAGES[stage] + (total && stage !== "resume" ? `, ${done} of ${total}` : "");
    }
  }

  /** One line of figures, all of them measured in this caption. */
  #finish({ timings, slipstream }) {
    this.isWhole = true;
    this.marks.end(now());
    this.timeline.ended();
    this.stage.textContent = `finished, first token after ${(timings.prompt_ms / 1000).toFixed(1)} s`;
    const facts = [`${timings.predicted_per_second.toFixed(1)} tokens/s`, `${timings.predicted_n} tokens`];
    if (timings.draft_n) facts.push(`${share(timings.draft_n_accepted, timings.draft_n)} of draft tokens accepted`);
    if (timings.draft_n && slipstream.speedup) facts.push(`${slipstream.speedup.toFixed(2)} times plain decoding`);
    this.result.textContent = facts.join(" · ");
  }
}
