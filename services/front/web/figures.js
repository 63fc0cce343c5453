// Figures of batches, from what the archive counts, and what is odd about texts. Pure.

/** Seconds over which a rate is measured. */
const WINDOW_S = 600;
const STATES = ["queued", "running", "done", "failed", "dead", "cancelled"];

/** Jobs by state over all batches. */
export function countsOf(batches) {
  const counts = Object.fromEntries(STATES.map((state) => [state, 0]));
  for (const batch of batches) for (const state of STATES) counts[state] += batch.counts[state];
  return counts;
}

/** What speculation did over all batches. */
export function totalsOf(batches) {
  const totals = { tokens: 0, generate_s: 0, plain_generate_s: 0, judged: 0, accepted: 0 };
  for (const batch of batches) for (const name of Object.keys(totals)) totals[name] += batch.totals[name];
  return totals;
}

/** How fast jobs end, from counts that were seen one after the other. */
export class Rate {
  #seen = [];

  add(done, now_s) {
    const last = this.#seen.at(-1);
    if (last && done < last.done) this.#seen = []; // batches were removed
    this.#seen.push({ done, now_s });
    while (this.#seen.length > 2 && this.#seen[1].now_s < now_s - WINDOW_S) this.#seen.shift();
  }

  /** Jobs a second; NaN where none ended while this was looked at. */
  get perSecond() {
    const [first, last] = [this.#seen[0], this.#seen.at(-1)];
    return last && last.done > first.done ? (last.done - first.done) / (last.now_s - first.now_s) : NaN;
  }
}

/** Jobs a second of batches that are not over, since they were handed in: for a page that was just opened. */
export function rateSinceCreated(batches, now_s) {
  const open = batches.filter((batch) => !batch.is_ended && batch.counts.done);
  const rates = open.map((batch) => batch.counts.done / Math.max(now_s - batch.created_s, 1));
  return rates.length ? rates.reduce((sum, rate) => sum + rate, 0) : NaN;
}

export const ended = ({ counts }) => counts.done + counts.failed + counts.dead + counts.cancelled;

/** What keeps jobs of a batch from running, where some wait. */
export function whyWaiting({ counts, obstacle }) {
  return counts.queued && obstacle ? `${counts.queued} wait: ${obstacle}` : "";
}

/** How many texts of a batch are marked, in words. */
export function markedOf({ totals }) {
  const found = ["empty", "cut", "looped"].filter((mark) => totals[mark]).map((mark) => `${totals[mark]} ${mark}`);
  return found.join(", ") || "none";
}

/** What is odd about a text, what there is to see where that is little, and why the text is not of these frames. */
export function notesOf({ quality = [], marks = [], shared, skipped }) {
  const notes = [...quality, ...marks.filter((mark) => mark !== skipped)];
  if (skipped) notes.push(`skipped: ${skipped}`);
  if (shared) notes.push(`shared with ${shared.job_id ? `${shared.job_id}, ` : ""}segment ${shared.segment + 1}`);
  return notes;
}

export const MARKS_ARE = "Marks are for people to look at, and no verdict: empty, short for its batch, cut by the limit of tokens, looped, with a share of accepted draft tokens (acceptance) that is unusual in its batch, or of words that the target was much less sure of than is usual there (unsure).";
