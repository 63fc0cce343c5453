// "Try it": a video or document is dropped; it plays, and its caption is seen being written.

import { get } from "./api.js";
import { labelled, make } from "./dom.js";
import { Kept } from "./kept.js";
import { isDocument, isPicture, requests } from "./request.js";
import { Run } from "./run.js";
import { legend } from "./timeline.js";

const SPECULATIVE = "Speculative decoding";
const PLAIN = "Plain decoding";

/** Fills `main`; returns what is to be done when it is left. */
export function tryIt(main) {
  const view = new TryIt();
  main.append(view.element);
  return () => view.close();
}

class TryIt {
  #file = null;
  #url = "";
  #runs = [];
  #stopping = null;
  #kept = null;
  /** It is read page by page, about which there is no conversation. */
  #isRead = false;
  /** Earlier questions about the file, and what was answered. */
  #turns = [];

  constructor() {
    this.picker = make("input", { type: "file", id: "file", accept: "video/*,image/*,application/pdf,.mkv,.avi", change: () => this.#choose(this.picker.files[0]) });
    this.drop = make("div", { class: "drop" }, make("label", { for: "file" }, "Drop a video, a picture or a PDF here, or choose one: "), this.picker);
    this.prompt = make("input", { type: "text", placeholder: "the server's own question", maxlength: "4000" });
    this.frames = make("input", { type: "number", min: "1", max: "4096", placeholder: "default" });
    this.tokens = make("input", { type: "number", min: "1", max: "100000", placeholder: "default" });
    this.race = make("input", { type: "checkbox" });
    this.start = make("button", { class: "main", type: "button", disabled: true, click: () => this.#begin() }, "Caption it");
    this.further = make("button", { type: "button", disabled: true, click: () => this.#askOn() }, "Ask on");
    this.stop = make("button", { type: "button", disabled: true, click: () => this.#stopping?.abort() }, "Stop");
    this.told = make("p", { class: "soft", role: "status" });
    this.medium = make("div", { class: "medium" });
    this.said = make("div", { class: "soft", role: "log", "aria-label": "Earlier questions and answers" });
    this.runs = make("div", { class: "runs" });
    this.legend = legend();
    this.legend.hidden = true;
    const fields = make("div", { class: "fields" }, labelled("Question", this.prompt, "wide"), labelled("Frames", this.frames), labelled("Most tokens", this.tokens), labelled("Race plain decoding beside it", this.race, "check"), this.start, this.further, this.stop);
    const intro = make("p", { class: "soft" }, "Words appear as they are committed: ", make("span", { class: "by-draft" }, "written by the draft and accepted"), ", or ", make("span", { class: "by-target" }, "written by the target"), ". The file goes to this server and nowhere else.");
    this.element = make("div", {}, make("h1", {}, "Try it"), this.drop, fields, intro, this.told, make("div", { class: "shown" }, this.medium, make("div", {}, this.said, this.runs, this.legend)));
    this.#acceptDrops();
  }

  close() {
    this.#stopping?.abort();
    for (const run of this.#runs) run.close();
    this.#kept?.close();
    URL.revokeObjectURL(this.#url);
  }

  #acceptDrops() {
    const over = (isOver) => (event) => {
      event.preventDefault();
      this.drop.classList.toggle("over", isOver);
    };
    this.drop.addEventListener("dragover", over(true));
    this.drop.addEventListener("dragleave", over(false));
    this.drop.addEventListener("drop", (event) => {
      over(false)(event);
      this.#choose(event.dataTransfer.files[0]);
    });
  }

  #choose(file) {
    if (!file) return;
    this.#stopping?.abort(); // what is being written is about the file before
    this.#file = file;
    this.#turns = [];
    this.further.disabled = true;
    URL.revokeObjectURL(this.#url);
    this.#url = URL.createObjectURL(file);
    this.#kept?.close();
    const medium = this.#shown(file);
    this.#kept = medium && new Kept(medium);
    this.medium.replaceChildren(this.#kept?.element || "", make("p", { class: "soft" }, `${file.name}, ${(file.size / 1e6).toFixed(1)} MB`));
    this.start.disabled = this.#stopping !== null; // until that has ended
    this.start.focus();
  }

  #shown(file) {
    if (isDocument(file)) return null;
    if (isPicture(file)) return make("img", { src: this.#url, alt: `The picture ${file.name}` });
    const video = make("video", { src: this.#url, controls: true, loop: true, playsinline: true, autoplay: true, "aria-label": `The video ${file.name}` });
    video.muted = true;
    return video;
  }

  #begin() {
    this.#turns = [];
    return this.#start();
  }

  /** The next question knows the answers before it. */
  #askOn() {
    if (this.prompt.value.trim()) return this.#start();
    this.told.textContent = "Type the next question first.";
    this.prompt.focus();
  }

  async #start() {
    this.#stopping = new AbortController();
    const { signal } = this.#stopping;
    this.start.disabled = this.further.disabled = true;
    this.stop.disabled = false;
    this.told.replaceChildren();
    try {
      await this.#caption(signal);
    } catch (error) {
      if (error.name !== "AbortError") this.told.replaceChildren(make("span", { class: "bad" }, error.message));
    } finally {
      this.#stopping = null;
      this.start.disabled = false;
      this.further.disabled = !this.#turns.length || this.#isRead;
      this.stop.disabled = true;
    }
  }

  async #caption(signal) {
    const { data } = await get("/v1/models", { signal });
    this.#isRead = isDocument(this.#file) || Boolean(isPicture(this.#file) && data[0].slipstream?.reads_documents);
    const asked = { prompt: this.prompt.value.trim(), frames: this.frames.valueAsNumber || 0, tokens: this.tokens.valueAsNumber || 0 };
    const methods = this.race.checked ? ["", "autoregressive"] : [""];
    const bodies = await requests(this.#file, data[0].id, asked, methods, this.#turns);
    this.said.replaceChildren(...this.#turns.flatMap(({ question, answer }) => [make("p", {}, make("strong", {}, question || "(the server's own question)")), make("p", {}, answer)]));
    for (const run of this.#runs) run.close();
    const onKept = (said) => this.#kept?.show(said);
    this.#runs = methods.map((method) => new Run(method ? PLAIN : SPECULATIVE, !method, method ? () => {} : onKept));
    this.runs.replaceChildren(...this.#runs.map((run) => run.element));
    this.legend.hidden = false;
    if (this.race.checked) this.told.textContent = "Both run at once on the same models, so each is slower than it would be alone.";
    await Promise.all(this.#runs.map((run, index) => run.go(bodies[index], signal)));
    const [answered] = this.#runs;
    if (answered.isWhole) this.#turns.push({ question: asked.prompt, answer: answered.text });
  }
}
