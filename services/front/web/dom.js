// Elements. All text comes in as text: nothing here, or anywhere on the page, reads a string as HTML.

/** An element with attributes and children; functions among the attributes listen to the event of that name. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(key, value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A label around an input. */
export function labelled(text, input, kind = "") {
  return kind === "check" ? make("label", { class: kind }, input, text) : make("label", { class: kind }, text, input);
}

/** Seconds as people say them. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "unknown";
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(0)}%` : "none");
