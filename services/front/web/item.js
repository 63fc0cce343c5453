// "Item": one caption of a batch, its text beside the clip, and how it came about.

import { get } from "./api.js";
import { labelled, make, share } from "./dom.js";
import { poll } from "./poll.js";
import { Cards } from "./table.js";

const EVERY_S = 5;

export function item(main, batch, job, page) {
  const view = new ItemView(batch, job, page);
  main.append(view.element);
  return () => view.close();
}

class ItemView {
  #url = "";
  #text = null;

  constructor(batch, id, page) {
    this.id = id;
    this.path = `/archive/batches/${encodeURIComponent(batch)}/jobs?page=${encodeURIComponent(page)}`;
    this.name = make("h1", {}, "Item");
    this.told = make("p", { class: "bad", role: "status" });
    this.cards = new Cards();
    this.video = make("video", { controls: true, playsinline: true, hidden: true, "aria-label": "The clip" });
    this.track = this.video.addTextTrack("captions", "Caption", "en");
    this.track.addEventListener("cuechange", () => this.#mark());
    this.picker = make("input", { type: "file", accept: "video/*", change: () => this.#play(this.picker.files[0]) });
    this.cues = make("ol", { class: "cues" });
    this.receipt = make("dl", { class: "cards" });
    const clip = make("div", { class: "medium" }, this.video, labelled("The clip lies with the gateway; choose your copy of it to see the caption over it: ", this.picker), make("p", { class: "soft" }, "The sentences share out the clip's length: no model said when each happens."));
    this.element = make("div", {}, make("p", {}, make("a", { href: `#/batch/${encodeURIComponent(batch)}` }, "Back to the batch")), this.name, this.told, this.cards.element, make("div", { class: "shown" }, clip, make("div", {}, make("h2", {}, "Caption"), this.cues)), make("h2", {}, "Receipt"), this.receipt);
    this.stop = poll(EVERY_S, (signal) => get(this.path, { signal }), (found) => this.#show(found), (message) => (this.told.textContent = message));
  }

  close() {
    this.stop();
    URL.revokeObjectURL(this.#url);
  }

  #show({ jobs }) {
    const job = jobs.find((one) => one.job_id === this.id);
    if (!job) throw new Error("there is no such item");
    this.name.textContent = job.custom_id;
    this.cards.show(figures(job));
    if (job.text !== undefined && job.text !== this.#text) this.#tell(job);
  }

  #tell(job) {
    this.#text = job.text;
    for (const cue of [...(this.track.cues || [])]) this.track.removeCue(cue);
    this.track.mode = "showing";
    const cues = job.cues.length ? job.cues : [{ start_ms: 0, end_ms: 0, text: job.text }];
    this.cues.replaceChildren(...cues.map((cue) => this.#line(cue)));
    this.receipt.replaceChildren(...Object.entries(flat(job.receipt || {})).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", { class: "soft" }, String(value)))));
  }

  #line({ start_ms, end_ms, text }) {
    const cue = new VTTCue(start_ms / 1000, end_ms / 1000, "");
    cue.text = text.replaceAll("&", "&amp;").replaceAll("<", "&lt;"); // WebVTT has tags of its own
    this.track.addCue(cue);
    const button = make("button", { type: "button", click: () => this.#jump(start_ms / 1000) }, text);
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

function figures(job) {
  const shown = { State: job.state, Source: job.source, Worker: job.worker || "none", "Failed runs": job.attempts, "Crashed runs": job.crashes };
  if (job.error) Object.assign(shown, { Why: job.error, Status: job.error_code });
  if (job.parts_total) shown.Pages = `${job.parts_done} of ${job.parts_total}`;
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
