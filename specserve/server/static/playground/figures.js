// Figures: how they are written, and what they say.

export const number = (value, digits) => (value === null || value === undefined ? "-" : value.toFixed(digits));
export const percent = (value) => (value === null || value === undefined ? "-" : Math.round(100 * value) + " %");
export const median = (values) => [...values].sort((a, b) => a - b)[values.length >> 1]; // of an odd number of them

// How many tokens drafters proposed, how many of these were accepted, and the share: null without any. Those that a
// grammar left no choice of, which sources count apart, were nobody's guess.
export function guesses(drafted, accepted, { jump_forward: forced = { num_draft_tokens: 0, num_accepted_tokens: 0 } }) {
  const [own, right] = [drafted - forced.num_draft_tokens, accepted - forced.num_accepted_tokens];
  return { drafted: own, accepted: right, rate: own ? right / own : null, forced: forced.num_accepted_tokens };
}

// Rows of a table from { source: { num_draft_tokens, num_accepted_tokens } }.
export const sourceRows = (sources) => Object.entries(sources).map(([name, { num_draft_tokens: n, num_accepted_tokens: kept }]) =>
  [name, String(n), String(kept), percent(n ? kept / n : null)]);

// What sources did between two readings of their counts.
export function between(before, after) {
  const zero = { num_draft_tokens: 0, num_accepted_tokens: 0 };
  const part = (name, key) => Math.max(0, after[name][key] - (before[name] || zero)[key]); // an engine that restarts counts from 0
  return Object.fromEntries(Object.keys(after).map((name) => [name, {
    num_draft_tokens: part(name, "num_draft_tokens"), num_accepted_tokens: part(name, "num_accepted_tokens") }]));
}

const range = (values, digits) => `${number(Math.min(...values), digits)} to ${number(Math.max(...values), digits)}`;

// The median of runs and what they range over; "-" where one has no value: a single token has no speed.
export const spread = (values, digits) => (values.includes(null) ? "-" : `${number(median(values), digits)} (${range(values, digits)})`);

// What the tokens per second say. A difference is one where each run of the one was faster than any of the other: in
// 5 and 5 runs that are alike that comes once in 126 times.
export function verdict({ drafts, plain }) {
  if ([...drafts, ...plain].includes(null)) return "Too short to compare the speed.";
  const apart = Math.min(...drafts) > Math.max(...plain) || Math.max(...drafts) < Math.min(...plain);
  return apart ? `${number(median(drafts) / median(plain), 2)} times the speed with drafts.` : "No measurable difference in speed.";
}

// The first character, counted from 1, in which two different texts differ.
export function difference(one, other) {
  const [a, b] = [[...one], [...other]];
  let index = 0;
  while (index < a.length && a[index] === b[index]) index++;
  return index + 1;
}
