// The timeline of one caption, on a canvas: the target's passes above, the draft's lines below, time to the right.

import { firstFrom } from "./marks.js";
import { make, labelled } from "./dom.js";

const HEIGHT = 168;
const LEFT = 58;
const LANES = { target: { top: 12, height: 72 }, draft: { top: 98, height: 44 } };
const RECENT_S = 4;
const EVERY_MS = 60;
const LEGEND = [
  ["own", "the target's own token"],
  ["accepted", "draft tokens accepted"],
  ["rejected", "rejected, or never judged"],
  ["writes", "the draft writes"],
  ["stale", "of a line that was given up"],
  ["prepares", "decoding, encoding, guidance, prefill"],
  ["hold", "hold: the target waits for the draft"],
  ["idle", "idle, or messages under way"],
];

export class Timeline {
  #marks;
  #frame = 0;
  #drawn_ms = 0;
  #isRecent = true;
  #colours = null;

  constructor(marks, title) {
    this.#marks = marks;
    this.canvas = make("canvas", { role: "img", "aria-label": `Timeline of ${title}` });
    this.said = make("p", { class: "soft" });
    this.zoom = make("select", { change: () => this.#choose(this.zoom.value === "recent") }, make("option", { value: "recent" }, `last ${RECENT_S} s`), make("option", { value: "all" }, "from the beginning"));
    this.element = make("div", { class: "timeline" }, this.canvas, make("div", { class: "fields" }, labelled("Shown", this.zoom)), this.said);
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.onDark = () => {
      this.#colours = null;
      this.changed();
    };
    this.dark.addEventListener("change", this.onDark);
    this.resizing = new ResizeObserver(() => this.changed());
    this.resizing.observe(this.canvas);
  }

  /** Draws soon, once however often it is told, and no oftener than `EVERY_MS`. */
  changed() {
    this.#frame ||= requestAnimationFrame((now_ms) => {
      this.#frame = 0;
      if (now_ms - this.#drawn_ms < EVERY_MS) {
        this.changed();
        return;
      }
      this.#drawn_ms = now_ms;
      this.#draw();
    });
  }

  /** The whole caption, once it is over. */
  ended() {
    this.zoom.value = "all";
    this.#choose(false);
  }

  close() {
    cancelAnimationFrame(this.#frame);
    this.resizing.disconnect();
    this.dark.removeEventListener("change", this.onDark);
  }

  #choose(isRecent) {
    this.#isRecent = isRecent;
    this.changed();
  }

  #draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== HEIGHT * scale) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = HEIGHT * scale;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    this.#colours ||= colours(this.canvas);
    const to_s = Math.max(this.#marks.end_s, 0.5);
    const from_s = this.#isRecent ? Math.max(0, to_s - RECENT_S) : 0;
    const span_s = this.#isRecent ? RECENT_S : to_s * 1.02;
    const view = { context, colours: this.#colours, from_s, to_s: from_s + span_s, x: (at_s) => LEFT + ((at_s - from_s) / span_s) * (width - LEFT - 6), width, pixel_s: span_s / (width * scale) };
    drawGround(view);
    drawPreparing(view, this.#marks);
    drawDraft(view, this.#marks);
    drawPasses(view, this.#marks);
    this.#tell();
  }

  /** The same in words, for who does not see the canvas. */
  #tell() {
    const { passes, judged, accepted, written, stale, restarts } = this.#marks.counts;
    const drafted = `, ${accepted} of ${judged} tokens of windows accepted; the draft wrote ${written} (${stale} too late) and began anew ${restarts} times`;
    const words = `${passes} target passes${judged + written ? drafted : ""}`;
    if (this.said.textContent !== words) this.said.textContent = words;
  }
}

/** What the colours mean. */
export function legend() {
  const row = ([name, text]) => make("li", {}, make("i", { class: `k-${name}` }), text);
  return make("ul", { class: "legend", "aria-label": "What the colours of the timeline mean" }, ...LEGEND.map(row));
}

function colours(element) {
  const style = getComputedStyle(element);
  const names = ["paper", "soft", "line", "ink", ...LEGEND.map(([name]) => name)];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// -- drawing ----------------------------------------------------------------------------------------------------------

function bar({ context, x, from_s, to_s }, begin_s, end_s, top, height, colour) {
  if (end_s < from_s || begin_s > to_s || height <= 0) return;
  const left = x(Math.max(begin_s, from_s));
  context.fillStyle = colour;
  context.fillRect(left, top, Math.max(x(Math.min(end_s, to_s)) - left, 1), height);
}

/** Indices of the marks that are shown: one a pixel where they are denser, so that hours cost no more than seconds. */
function* shownOf(list, { from_s, pixel_s }, offset_s) {
  let index = firstFrom(list, from_s - offset_s);
  while (index < list.length) {
    yield index;
    const next_s = list[index].at_s + pixel_s;
    index = list[index + 1]?.at_s < next_s ? firstFrom(list, next_s) : index + 1;
  }
}

function drawGround({ context, colours, x, from_s, to_s, width }) {
  context.fillStyle = colours.paper;
  context.fillRect(0, 0, width, HEIGHT);
  context.font = '12px system-ui, "DejaVu Sans", sans-serif';
  context.textBaseline = "middle";
  context.fillStyle = colours.soft;
  for (const [name, lane] of Object.entries(LANES)) context.fillText(name, 8, lane.top + lane.height / 2);
  const step_s = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 3600].find((step) => (to_s - from_s) / step <= 9) || 7200;
  for (let at_s = Math.ceil(from_s / step_s) * step_s; at_s <= to_s; at_s += step_s) {
    context.fillStyle = colours.line;
    context.fillRect(x(at_s), LANES.target.top, 1, LANES.draft.top + LANES.draft.height - LANES.target.top);
    context.fillStyle = colours.soft;
    if (x(at_s) < width - 40) context.fillText(`${Number(at_s.toFixed(1))} s`, x(at_s) + 2, HEIGHT - 10);
  }
}

function drawPreparing(view, marks) {
  const now_s = marks.end_s;
  for (const { name, from_s, to_s } of marks.stages) step(view, name, from_s, to_s ?? now_s, LANES.target);
  if (marks.draftStages.length) for (const { name, from_s, to_s } of marks.draftStages) step(view, name, from_s, to_s, LANES.draft);
  else if (marks.draft) step(view, "guidance, prefill", marks.draft.from_s, marks.draft.to_s ?? now_s, LANES.draft);
}

function step(view, name, from_s, to_s, lane) {
  bar(view, from_s, to_s, lane.top + lane.height / 4, lane.height / 2, view.colours.prepares);
  const left = view.x(Math.max(from_s, view.from_s));
  if (to_s < view.from_s || view.x(to_s) - left < view.context.measureText(name).width + 8) return;
  view.context.fillStyle = view.colours.ink;
  view.context.fillText(name, left + 4, lane.top + lane.height / 2);
}

function drawDraft(view, marks) {
  const { top, height } = LANES.draft;
  const { drafts, restarts, offset_s } = marks;
  for (const index of shownOf(drafts, view, offset_s)) {
    const { at_s, pass_s, tokens, stale } = drafts[index];
    const end_s = marks.at(at_s);
    bar(view, end_s - pass_s * Math.max(tokens, 1), end_s, top + 6, height - 12, stale ? view.colours.stale : view.colours.writes);
  }
  view.context.fillStyle = view.colours.ink;
  for (const index of shownOf(restarts, view, offset_s)) {
    const at_s = marks.at(restarts[index].at_s);
    if (at_s <= view.to_s) view.context.fillRect(view.x(at_s), top, 1, height);
  }
}

/** A bar's height is the window with the target's own token: from below what was accepted, its own, what was not. */
function drawPasses(view, marks) {
  const { top, height } = LANES.target;
  const { passes, offset_s } = marks;
  for (const index of shownOf(passes, view, offset_s)) {
    const { at_s, asked_s, pass_s, tokens, accepted } = passes[index];
    const before = passes[index - 1];
    if (before && asked_s > before.at_s) bar(view, marks.at(before.at_s), marks.at(asked_s), top + height - 6, 6, view.colours.hold);
    const end_s = marks.at(at_s);
    const unit = height / marks.mostTokens;
    let bottom = top + height;
    for (const [count, colour] of [[accepted, view.colours.accepted], [1, view.colours.own], [tokens - accepted, view.colours.rejected]]) {
      bar(view, end_s - pass_s, end_s, bottom - unit * count, unit * count, colour);
      bottom -= unit * count;
    }
  }
}
