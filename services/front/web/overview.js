// "Overview": what of the caller's work waits, runs and is done, and whether the service can do it.

import { get, send } from "./api.js";
import { duration, make, share } from "./dom.js";
import { countsOf, ended, Rate, rateSinceCreated, totalsOf } from "./figures.js";
import { poll } from "./poll.js";
import { bar, Cards, link, Table } from "./table.js";

const EVERY_S = 2;
/** Batches that are not over whose running jobs are listed. */
const MOST_OPEN = 5;
const href = (batch) => `#/batch/${encodeURIComponent(batch.batch_id)}`;

export function overview(main) {
  const cards = new Cards();
  const service = new Cards();
  const batches = new Table("Batches", ["Batch", "State", "Progress", "Done", "Failed", "Given up", "Speedup"], "No batch was handed in.");
  const running = new Table("Running jobs", ["Item", "Batch", "Worker", "For", "At"], "Nothing runs.");
  const gateways = new Table("Gateways", ["Gateway", "Worker", "Jobs it has", "Leases renewed", "Store takes writes", "Gate"], "No gateway is known.");
  const told = make("p", { class: "bad", role: "status" });
  const rate = new Rate();
  main.append(make("h1", {}, "Overview"), told, cards.element, make("h2", {}, "Service"), service.element, make("h2", {}, "Gateways and their workers"), gateways.element, make("h2", {}, "Batches"), batches.element, make("h2", {}, "Running"), running.element);
  const show = (found) => {
    const now_s = Date.now() / 1000;
    rate.add(countsOf(found.batches).done, now_s);
    const perSecond = Number.isNaN(rate.perSecond) ? rateSinceCreated(found.batches, now_s) : rate.perSecond;
    cards.show(figures(found.batches, perSecond));
    service.show(health(found.ready, found.running, now_s));
    gateways.show(found.gateways.map((gateway, index) => [String(index), gatewayRow(gateway, index)]));
    batches.show(found.batches.map((batch) => [batch.batch_id, row(batch)]));
    running.show(found.running.map(([batch, job]) => [`${batch.batch_id} ${job.job_id}`, runningRow(batch, job, now_s)]));
  };
  return poll(EVERY_S, ask, show, (message) => {
    if (told.textContent !== message) told.textContent = message;
  });
}

async function ask(signal) {
  const ready = await fetchReady(signal);
  const { batches } = await get("/archive/batches", { signal }).catch((error) => {
    if (error.code !== "not_served") throw error;
    return { batches: [] }; // a service without an archive has its health to show
  });
  const { gateways } = await get("/archive/gateways", { signal });
  const open = batches.filter((batch) => batch.counts.running).slice(0, MOST_OPEN);
  const pages = await Promise.all(open.map((batch) => get(`/archive/batches/${encodeURIComponent(batch.batch_id)}/jobs?states=running`, { signal })));
  return { ready, batches, gateways, running: pages.flatMap((page, index) => page.jobs.map((job) => [open[index], job])) };
}

/** Of a service that is not ready, too: it says what is missing. */
async function fetchReady(signal) {
  const response = await fetch("/ready", { signal, cache: "no-store" }).catch((error) => {
    if (error.name === "AbortError") throw error;
    return send("/ready", { signal });
  });
  return response.json();
}

function figures(batches, perSecond) {
  const counts = countsOf(batches);
  const totals = totalsOf(batches);
  const left = counts.queued + counts.running;
  return {
    Waiting: counts.queued,
    Running: counts.running,
    Done: counts.done,
    Failed: counts.failed,
    "Given up (dead)": counts.dead,
    "Items an hour": Number.isNaN(perSecond) ? "unknown" : (3600 * perSecond).toFixed(0),
    "Left, at this rate": left ? duration(left / perSecond) : "nothing",
    "Speedup over plain": totals.generate_s && totals.plain_generate_s ? (totals.plain_generate_s / totals.generate_s).toFixed(2) : "not measured",
    "Draft tokens accepted": share(totals.accepted, totals.judged),
    "Tokens a second of work": totals.generate_s ? (totals.tokens / totals.generate_s).toFixed(1) : "none yet",
  };
}

function health(ready, running, now_s) {
  const gateways = ready.gateways || [];
  const serving = (kind) => `${gateways.filter((gateway) => gateway[kind] === "SERVING").length} of ${gateways.length}`;
  const workers = new Set(running.map(([, job]) => job.worker));
  const oldest = Math.max(0, ...running.map(([, job]) => now_s - job.started_s));
  return {
    "Gateways that serve": serving("gateway"),
    "Archives whose store takes writes": serving("archive"),
    "Files of this server": ready.data === "ok" ? "can be written" : ready.data || "unknown",
    "Workers at work": workers.size,
    "Longest run now": running.length ? duration(oldest) : "none",
  };
}

/** A worker without a job is seen, too; "lost" is one whose leases have run out. */
function gatewayRow({ answers, archive, gates, has_draft }, index) {
  const name = `gateway ${index + 1}`;
  if (!answers) return [name, "does not answer", "", "", "", ""];
  const gate = has_draft ? `${gates.open} open, ${gates.closed} closed` : "no draft";
  if (!archive) return [name, "no archive", "", "", "", gate];
  const writes = archive.takes_writes ? "yes" : "no";
  if (!archive.worker) return [name, "runs no jobs", "", "", writes, gate];
  const age = `${duration(archive.lease_age_s)} ago${archive.lease_age_s > archive.lease_s ? ": lost" : ""}`;
  return [name, archive.worker, `${archive.jobs || "none"} of ${archive.max_jobs}`, age, writes, gate];
}

function row(batch) {
  const { counts, totals } = batch;
  const speedup = totals.generate_s && totals.plain_generate_s ? (totals.plain_generate_s / totals.generate_s).toFixed(2) : "";
  return [link(batch.key || batch.batch_id, href(batch)), batch.state, bar(ended(batch), counts.total, `${ended(batch)} of ${counts.total} ended`), `${counts.done} of ${counts.total}`, counts.failed, counts.dead, speedup];
}

function runningRow(batch, job, now_s) {
  return [job.custom_id, link(batch.key || batch.batch_id, href(batch)), job.worker, duration(Math.max(0, now_s - job.started_s)), job.progress];
}
