// "Item": one caption of a batch, its text beside the clip, and how it came about.

import { get } from "./api.js";
import { labelled, make, share } from "./dom.js";
import { MARKS_ARE, notesOf } from "./figures.js";
import { poll } from "./poll.js";
import { Cards } from "./table.js";

const EVERY_S = 5;
/** Pages or segments that are shown of one item. */
const MOST_PARTS = 2000;
const SHARED_OUT = "The sentences share out the clip's length: no model said when each happens.";
const OF_THE_FILE = "The times are those of the file; a segment's text is about its own frames.";

export function item(main, batch, job, page) {
  const view = new ItemView(batch, job, page);
  main.append(view.element);
  return () => view.close();
}

class ItemView {
  #url = "";
  #told = null;

  constructor(batch, id, page) {
    this.id = id;
    this.jobs = `/archive/batches/${encodeURIComponent(batch)}/jobs`;
    this.page = encodeURIComponent(page);
    this.name = make("h1", {}, "Item");
    this.told = make("p", { class: "bad", role: "status" });
    this.cards = new Cards();
    this.video = make("video", { controls: true, playsinline: true, hidden: true, "aria-label": "The clip" });
    this.track = this.video.addTextTrack("captions", "Caption", "en");
    this.track.addEventListener("cuechange", () => this.#mark());
    this.picker = make("input", { type: "file", accept: "video/*", change: () => this.#play(this.picker.files[0]) });
    this.times = make("p", { class: "soft" }, SHARED_OUT);
    this.cues = make("ol", { class: "cues" });
    this.receipt = make("dl", { class: "cards" });
    const clip = make("div", { class: "medium" }, this.video, labelled("The clip lies with the gateway; choose your copy of it to see the caption over it: ", this.picker), this.times);
    this.element = make("div", {}, make("p", {}, make("a", { href: `#/batch/${encodeURIComponent(batch)}` }, "Back to the batch")), this.name, this.told, this.cards.element, make("div", { class: "shown" }, clip, make("div", {}, make("h2", {}, "Caption"), this.cues, make("p", { class: "soft" }, MARKS_ARE))), make("h2", {}, "Receipt"), this.receipt);
    this.stop = poll(EVERY_S, (signal) => this.#ask(signal), (found) => this.#show(found), (message) => (this.told.textContent = message));
  }

  close() {
    this.stop();
    URL.revokeObjectURL(this.#url);
  }

  /** The item, and the lines of its text where it has become another. */
  async #ask(signal) {
    const { jobs } = await get(`${this.jobs}?page=${this.page}`, { signal });
    const job = jobs.find((one) => one.job_id === this.id);
    if (!job) throw new Error("there is no such item");
    const version = `${job.state} ${job.parts_done} ${job.text}`;
    if (version === this.#told) return { job };
    const lines = job.parts_done ? await this.#parts(signal) : linesOf(job);
    return { job, lines, version };
  }

  async #parts(signal) {
    const parts = [];
    for (let page = ""; page !== null && parts.length < MOST_PARTS; ) {
      const found = await get(`${this.jobs}/${encodeURIComponent(this.id)}/parts?page=${encodeURIComponent(page)}`, { signal });
      parts.push(...found.parts);
      page = found.next_page;
    }
    return parts.map(lineOf);
  }

  #show({ job, lines, version }) {
    this.name.textContent = job.custom_id;
    this.cards.show(figures(job));
    if (version) this.#tell(job, lines, version);
  }

  #tell(job, lines, version) {
    this.#told = version;
    for (const cue of [...(this.track.cues || [])]) this.track.removeCue(cue);
    this.track.mode = "showing";
    this.times.textContent = (lines.some((line) => line.isTimed) ? OF_THE_FILE : SHARED_OUT) + (lines.length < MOST_PARTS ? "" : ` The first ${lines.length} are shown.`);
    const focused = [...this.cues.children].findIndex((line) => line.contains(document.activeElement));
    this.cues.replaceChildren(...lines.map((line) => this.#line(line)));
    this.cues.children[focused]?.firstElementChild.focus();
    this.receipt.replaceChildren(...Object.entries(flat(job.receipt || {})).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", { class: "soft" }, String(value)))));
  }

  #line({ start_ms, end_ms, text, about, notes }) {
    const cue = new VTTCue(start_ms / 1000, end_ms / 1000, "");
    cue.text = text.replaceAll("&", "&amp;").replaceAll("<", "&lt;"); // WebVTT has tags of its own
    this.track.addCue(cue);
    const button = make("button", { type: "button", click: () => this.#jump(start_ms / 1000) }, about && make("span", { class: "soft" }, about, " "), text, notes.length ? make("span", { class: "mark" }, notes.join(", ")) : null);
    button.cue = cue;
    return make("li", {}, button);
  }

  #jump(seconds) {
    if (this.video.hidden) return;
    this.video.currentTime = seconds;
    this.video.play();
  }

  #play(file) {
    if (!file) return;
    URL.revokeObjectURL(this.#url);
    this.#url = URL.createObjectURL(file);
    this.video.hidden = false;
    this.video.src = this.#url;
    this.track.mode = "showing";
  }

  #mark() {
    const active = new Set(this.track.activeCues || []);
    for (const button of this.cues.querySelectorAll("button")) {
      if (active.has(button.cue)) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
  }
}

/** The sentences of a video's caption. */
function linesOf({ text, cues }) {
  if (text === undefined) return [];
  const found = cues.length ? cues : [{ start_ms: 0, end_ms: 0, text }];
  return found.map((cue) => ({ ...cue, about: "", notes: [] }));
}

/** A page of a document or a segment of a film. */
function lineOf(part) {
  const { segment, error } = part;
  const seconds = (at_s) => at_s.toFixed(1);
  let about = segment ? `${seconds(segment.start_s)} to ${seconds(segment.end_s)} s` : `page ${part.page}`;
  if (segment?.is_summary) about = "the whole";
  if (segment?.prompt) about += `, question ${segment.prompt + 1}`;
  const times = { start_ms: 1000 * (segment?.start_s || 0), end_ms: 1000 * (segment?.end_s || 0) };
  return { ...times, about, text: part.text ?? "", notes: error ? [error] : notesOf(part), isTimed: Boolean(segment) };
}

function figures(job) {
  const shown = { State: job.state, Source: job.source, Worker: job.worker || "none", "Failed runs": job.attempts, "Crashed runs": job.crashes };
  if (job.error) Object.assign(shown, { Why: job.error, Status: job.error_code });
  if (job.parts_total) shown[job.kind === "film" ? "Segments" : "Pages"] = `${job.parts_done} of ${job.parts_total}`;
  if (job.text !== undefined) shown.Marks = notesOf(job).join(", ") || "none";
  if (job.figures) {
    const { timings, slipstream } = job.figures;
    Object.assign(shown, { "Tokens a second": timings.predicted_per_second.toFixed(1), "Draft tokens accepted": share(timings.draft_n_accepted, timings.draft_n), "Speedup over plain": slipstream.speedup ? slipstream.speedup.toFixed(2) : "not measured", "Target passes": slipstream.passes });
  }
  if (job.gate?.start) shown.Gate = job.gate.reason ? `${job.gate.start}: ${job.gate.reason}` : job.gate.start;
  return shown;
}

/** Nested names joined by a dot; without what is empty. */
function flat(value, prefix = "") {
  const found = {};
  for (const [name, inner] of Object.entries(value)) {
    if (inner && typeof inner === "object" && !Array.isArray(inner)) Object.assign(found, flat(inner, `${prefix}${name}.`));
    else if (inner !== null && inner !== "" && !(Array.isArray(inner) && !inner.length)) found[prefix + name] = inner;
  }
  return found;
}
