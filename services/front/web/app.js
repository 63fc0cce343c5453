// The page: which view is shown, whose token is sent, whether the server is there.

import { Away, keepToken, send, token } from "./api.js";
import { batch } from "./batch.js";
import { make } from "./dom.js";
import { item } from "./item.js";
import { overview } from "./overview.js";
import { tryIt } from "./try.js";

const LOOK_MS = 5000;
const ROUTES = [
  [/^#\/$/, tryIt, "Try it"],
  [/^#\/overview$/, overview, "Overview"],
  [/^#\/batch\/([^/]+)$/, batch, "Batch"],
  [/^#\/batch\/([^/]+)\/item\/([^/]+)\/([^/]*)$/, item, "Item"],
];

const main = document.getElementById("main");
const field = document.getElementById("token");
const server = document.getElementById("server");
let leave = () => {};

function show() {
  const hash = location.hash || "#/";
  const [pattern, view, title] = ROUTES.find(([pattern]) => pattern.test(hash)) || [/^/, nothing, "Nothing here"];
  leave();
  main.replaceChildren();
  document.title = `${title} - Slipstream`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === hash) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  leave = view(main, ...(pattern.exec(hash) || []).slice(1).map(decodeURIComponent)) || (() => {});
}

function nothing(main) {
  main.append(make("h1", {}, "There is nothing at this address"));
}

/** Whether the server can do its work, asked while the page is seen. */
async function look() {
  if (!document.hidden) {
    let said = "ready";
    try {
      await send("/ready");
    } catch (error) {
      said = error instanceof Away ? "the server is away, or not ready" : error.message;
    }
    if (server.textContent !== said) server.textContent = said;
    server.classList.toggle("away", said !== "ready");
  }
  setTimeout(look, LOOK_MS);
}

field.value = token();
field.addEventListener("change", () => {
  keepToken(field.value.trim());
  show();
});
window.addEventListener("hashchange", () => {
  show();
  main.focus({ preventScroll: true }); // what comes next by keyboard is the new view
});
show();
look();
