"use strict";

// The online softmax of one row, four tiles of two keys, one column of V: small enough to follow by hand.

const SCORES = [[1.0, 2.0], [0.5, 3.0], [4.0, 1.5], [2.5, 3.5]];
const VALUES = [[1.0, -1.0], [2.0, 0.5], [-0.5, 1.5], [1.0, 3.0]];

const UPDATES = {
  fa2: { title: "FA2: divide once, at the end", rule: "O = exp(m - m') O + P V; at the end O / l" },
  fa1: { title: "FA1: normalised in every step", rule: "O = (l exp(m - m') O + P V) / l'" },
  "as-printed": { title: "as printed: without l, wrong", rule: "O = (exp(m - m') O + P V) / l'" },
};

function onlineRows(update) {
  let [m, l, o] = [-Infinity, 0, 0];
  const rows = [];
  SCORES.forEach((scores, tile) => {
    const newMax = Math.max(m, ...scores);
    const rescale = Math.exp(m - newMax);
    const weights = scores.map((s) => Math.exp(s - newMax));
    const product = weights.reduce((sum, w, i) => sum + w * VALUES[tile][i], 0);
    const newSum = l * rescale + weights.reduce((a, b) => a + b, 0);
    if (update === "fa2") o = rescale * o + product;
    if (update === "fa1") o = (l * rescale * o + product) / newSum;
    if (update === "as-printed") o = (rescale * o + product) / newSum;
    [m, l] = [newMax, newSum];
    rows.push({ scores, rescale, m, l, o, out: update === "fa2" ? o / l : o });
  });
  return rows;
}

function trueOutput() {
  const all = SCORES.flat();
  const weights = all.map((s) => Math.exp(s));
  const sum = weights.reduce((a, b) => a + b, 0);
  return weights.reduce((acc, w, i) => acc + (w * VALUES.flat()[i]) / sum, 0);
}
