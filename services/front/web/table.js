// Tables and figures that are brought up to date in place, so that focus and selection stay where they are.

import { make } from "./dom.js";

/** A table whose rows are kept by key; `cells` of a row are texts or elements. */
export class Table {
  #rows = new Map();

  constructor(caption, heads, empty) {
    this.body = make("tbody");
    this.empty = make("p", { class: "soft" }, empty);
    this.table = make("table", { "aria-label": caption }, make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))), this.body);
    this.element = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, this.table, this.empty);
  }

  /** `rows`: [key, cells]; a cell is a text, or a function that makes an element once and is given it again. */
  show(rows) {
    const keys = new Set(rows.map(([key]) => key));
    for (const [key, row] of this.#rows) {
      if (!keys.has(key)) {
        row.remove();
        this.#rows.delete(key);
      }
    }
    rows.forEach(([key, cells], index) => this.#place(key, cells, index));
    this.table.hidden = !rows.length;
    this.empty.hidden = rows.length > 0;
  }

  #place(key, cells, index) {
    let row = this.#rows.get(key);
    if (!row) {
      row = make("tr", {}, ...cells.map(() => make("td")));
      this.#rows.set(key, row);
    }
    if (this.body.children[index] !== row) this.body.insertBefore(row, this.body.children[index] || null);
    cells.forEach((cell, place) => fill(row.children[place], cell));
  }
}

function fill(place, cell) {
  if (typeof cell === "function") {
    const element = cell(place.firstElementChild);
    if (place.firstElementChild !== element) place.replaceChildren(element);
  } else if (place.textContent !== String(cell)) {
    place.textContent = cell;
  }
}

/** A cell with a link. */
export const link = (text, href) => (old) => {
  const element = old || make("a");
  if (element.textContent !== text) element.textContent = text;
  if (element.getAttribute("href") !== href) element.setAttribute("href", href);
  return element;
};

/** A cell with a bar. */
export const bar = (part, whole, what) => (old) => {
  const element = old || make("progress", { "aria-label": what });
  element.max = whole || 1;
  element.value = part;
  return element;
};

/** Figures with a name each. */
export class Cards {
  constructor() {
    this.element = make("dl", { class: "cards" });
    this.values = new Map();
  }

  show(figures) {
    for (const [name, value] of Object.entries(figures)) {
      if (!this.values.has(name)) {
        this.values.set(name, make("dd"));
        this.element.append(make("div", {}, make("dt", {}, name), this.values.get(name)));
      }
      fill(this.values.get(name), value);
    }
  }
}
