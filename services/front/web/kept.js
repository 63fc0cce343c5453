// What the draft sees of a clip: the video tokens that it keeps, as squares over the frames, at their times.

import { labelled, make, share } from "./dom.js";

/** A medium (`<video>` or `<img>`) with the squares above it. */
export class Kept {
  #map = null; // what was said last, with its bits
  #drawn = "";
  #frame = 0;

  constructor(medium) {
    this.medium = medium;
    this.canvas = make("canvas", { class: "kept", "aria-hidden": "true" });
    this.box = make("input", { type: "checkbox", checked: true, change: () => this.#soon() });
    this.said = make("p", { class: "soft" });
    this.told = make("div", { hidden: true }, labelled("Show the video tokens that the draft keeps", this.box, "check"), this.said);
    this.element = make("div", {}, make("div", { class: "frame" }, medium, this.canvas), this.told);
    for (const name of ["play", "seeked", "pause", "loadeddata", "load"]) medium.addEventListener(name, () => this.#soon());
    this.resizing = new ResizeObserver(() => this.#soon());
    this.resizing.observe(medium);
  }

  /** What a caption's stream says of kept tokens; null for a new caption, of which nothing is known yet. */
  show(said) {
    this.#map = said && { ...said, bits: Uint8Array.from(atob(said.bitmap), (char) => char.charCodeAt(0)) };
    this.told.hidden = !said;
    this.#drawn = "";
    this.#soon();
  }

  close() {
    cancelAnimationFrame(this.#frame);
    this.resizing.disconnect();
  }

  #soon() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#draw();
      if (this.#map && this.medium.paused === false) this.#soon();
    });
  }

  /** Draws where the step, the size or the wish for it has changed. */
  #draw() {
    const step = this.#map ? stepAt(this.#map.times_s, this.medium.currentTime || 0) : -1;
    const { clientWidth: width, clientHeight: height } = this.medium;
    const wanted = `${step} ${width} ${height} ${this.box.checked}`;
    if (wanted === this.#drawn) return;
    this.#drawn = wanted;
    this.canvas.width = width; // clears it, too
    this.canvas.height = height;
    if (step < 0 || !width) return;
    const area = areaOf(this.medium, this.#map.middle_square);
    if (this.box.checked) drawStep(this.canvas.getContext("2d"), this.#map, step, area);
    this.#tell(step);
  }

  #tell(step) {
    const map = this.#map;
    const size = map.num_rows * map.num_columns;
    const [all, here] = [numKept(map, 0, size * map.num_steps), numKept(map, step * size, (step + 1) * size)];
    this.said.textContent = `The draft keeps ${all} of ${size * map.num_steps} video tokens (${share(all, size * map.num_steps)}), ${here} of ${size} in what is shown now.`;
  }
}

const isKept = (map, token) => (map.bits[token >> 3] >> (token & 7)) & 1;

function numKept(map, from, to) {
  let count = 0;
  for (let token = from; token < to; token += 1) count += isKept(map, token);
  return count;
}

/** The step that is shown at a time: the last that began. */
function stepAt(times_s, at_s) {
  let step = 0;
  while (step + 1 < times_s.length && times_s[step + 1] <= at_s) step += 1;
  return step;
}

/** Where the model's picture lies in the element, whose content keeps its shape (`object-fit: contain`). */
function areaOf(medium, isSquare) {
  const [own, tall] = [medium.videoWidth || medium.naturalWidth || 1, medium.videoHeight || medium.naturalHeight || 1];
  const scale = Math.min(medium.clientWidth / own, medium.clientHeight / tall);
  const side = Math.min(own, tall);
  const [width, height] = isSquare ? [side * scale, side * scale] : [own * scale, tall * scale];
  return { x: (medium.clientWidth - width) / 2, y: (medium.clientHeight - height) / 2, width, height };
}

/** What is dropped lies in the dark, and around what is kept is a line. */
function drawStep(context, map, step, area) {
  const { num_rows, num_columns } = map;
  const [width, height] = [area.width / num_columns, area.height / num_rows];
  context.fillStyle = "rgba(0, 0, 0, 0.6)";
  context.strokeStyle = "#ffd34d";
  context.lineWidth = 1.5;
  for (let place = 0; place < num_rows * num_columns; place += 1) {
    const [x, y] = [area.x + (place % num_columns) * width, area.y + Math.floor(place / num_columns) * height];
    if (isKept(map, step * num_rows * num_columns + place)) context.strokeRect(x + 1, y + 1, width - 2, height - 2);
    else context.fillRect(x, y, width, height);
  }
}
