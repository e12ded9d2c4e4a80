"use strict";

// The schedules of ioattn.io.schedules as generators: each yields after every line that does something, so that a
// reader can stop there. `chip` counts. One head, N queries and keys, d columns, e bytes an element; sums are fp32.

const SUM = 4;

class Chip {
  constructor() {
    this.moved = new Map(); // tensor -> {read, written}
    this.tiles = new Map(); // name -> bytes on the chip now
    this.used = 0;
    this.peak = 0;
  }
  entry(tensor) {
    if (!this.moved.has(tensor)) this.moved.set(tensor, { read: 0, written: 0 });
    return this.moved.get(tensor);
  }
  load(tensor, bytes, kept = bytes) {
    this.entry(tensor).read += bytes;
    this.alloc(tensor, kept);
  }
  store(tensor, bytes) {
    this.entry(tensor).written += bytes;
  }
  alloc(name, bytes) {
    this.free(name);
    this.tiles.set(name, bytes);
    this.used += bytes;
    this.peak = Math.max(this.peak, this.used);
  }
  free(...names) {
    for (const name of names) {
      this.used -= this.tiles.get(name) ?? 0;
      this.tiles.delete(name);
    }
  }
  total(which) {
    let sum = 0;
    for (const m of this.moved.values()) sum += which ? m[which] : m.read + m.written;
    return sum;
  }
}

class Problem {
  constructor({ n, d, e, bq, bk, causal, splits = 8 }) {
    Object.assign(this, { n, d, e, bq, bk, causal, splits });
  }
  rowTiles() {
    return pieces(0, this.n, this.bq);
  }
  keyTiles() {
    return pieces(0, this.n, this.bk);
  }
  // Causal: query i sees the keys up to i, so a tile is visited when its first key is no later than its last query.
  keyTilesFor(rows) {
    const stop = this.causal ? Math.min(Math.ceil(rows.stop / this.bk) * this.bk, this.n) : this.n;
    return pieces(0, stop, this.bk);
  }
  rowTilesFor(cols) {
    const start = this.causal ? Math.floor(cols.start / this.bq) * this.bq : 0;
    return pieces(start, this.n, this.bq);
  }
  wide(tile) {
    return tile.size * this.d * this.e; // bytes of rows of Q, K, V, O
  }
}

function pieces(start, stop, size) {
  const found = [];
  for (let at = start; at < stop; at += size) {
    const end = Math.min(at + size, stop);
    found.push({ start: at, stop: end, size: end - at });
  }
  return found;
}

function* naiveScores(p, chip) {
  chip.load("K", p.n * p.d * p.e);
  yield [1, null, { start: 0, stop: p.n }];
  for (const rows of p.rowTiles()) {
    chip.load("Q", p.wide(rows));
    yield [2, rows, null];
    for (const cols of p.keyTiles()) {
      chip.alloc("S tile", rows.size * cols.size * SUM);
      chip.store("S", rows.size * cols.size * p.e);
      yield [3, rows, cols];
    }
    chip.free("Q", "S tile");
  }
  chip.free("K");
}

function* naiveOutput(p, chip) {
  chip.load("V", p.n * p.d * p.e);
  yield [9, null, { start: 0, stop: p.n }];
  for (const rows of p.rowTiles()) {
    chip.alloc("O sum", rows.size * p.d * SUM);
    for (const cols of p.keyTiles()) {
      chip.load("P", rows.size * cols.size * p.e);
      yield [10, rows, cols];
    }
    chip.store("O", p.wide(rows));
    yield [11, rows, null];
    chip.free("O sum", "P");
  }
  chip.free("V");
}

function* naive(p, chip) {
  yield* naiveScores(p, chip);
  for (const rows of p.rowTiles()) {
    chip.alloc("m, l", 2 * rows.size * SUM);
    for (const pass of [5, 6, 7]) {
      for (const cols of p.keyTiles()) {
        chip.load("S", rows.size * cols.size * p.e, rows.size * cols.size * SUM);
        if (pass === 7) chip.store("P", rows.size * cols.size * p.e);
        yield [pass, rows, cols];
      }
    }
    chip.free("m, l", "S");
  }
  yield* naiveOutput(p, chip);
}

function* fusedSoftmax(p, chip) {
  yield* naiveScores(p, chip);
  for (const rows of p.rowTiles()) {
    chip.load("S", rows.size * p.n * p.e, rows.size * p.n * SUM);
    chip.alloc("m, l", 2 * rows.size * SUM);
    yield [5, rows, { start: 0, stop: p.n }];
    chip.store("P", rows.size * p.n * p.e);
    yield [7, rows, { start: 0, stop: p.n }];
    chip.free("S", "m, l");
  }
  yield* naiveOutput(p, chip);
}

function* fa1(p, chip) {
  for (const cols of p.keyTiles()) {
    chip.load("K", p.wide(cols));
    chip.load("V", p.wide(cols));
    yield [1, null, cols];
    for (const rows of p.rowTilesFor(cols)) {
      chip.load("Q", p.wide(rows));
      yield [3, rows, cols];
      if (cols.start === 0) {
        chip.alloc("O", rows.size * p.d * SUM);
        for (const x of ["m", "l"]) chip.alloc(x, rows.size * SUM);
      } else {
        chip.load("O", p.wide(rows), rows.size * p.d * SUM);
        for (const x of ["m", "l"]) chip.load(x, rows.size * SUM);
      }
      yield [4, rows, cols];
      chip.alloc("S, P", rows.size * cols.size * SUM);
      chip.alloc("new m, l", 2 * rows.size * SUM);
      yield [5, rows, cols];
      chip.store("O", p.wide(rows));
      for (const x of ["m", "l"]) chip.store(x, rows.size * SUM);
      yield [8, rows, cols];
      chip.free("Q", "O", "m", "l", "S, P", "new m, l");
    }
    chip.free("K", "V");
  }
}

function* onlineSoftmax(p, chip, rows, keyTiles, line) {
  chip.load("Q", p.wide(rows));
  yield [line, rows, null];
  chip.alloc("O", rows.size * p.d * SUM);
  chip.alloc("m, l", 2 * rows.size * SUM);
  for (const cols of keyTiles) {
    chip.load("K", p.wide(cols));
    chip.load("V", p.wide(cols));
    yield [line + 3, rows, cols];
    chip.alloc("S, P", rows.size * cols.size * SUM);
    chip.alloc("new m, rescale", 2 * rows.size * SUM);
    yield [line + 4, rows, cols];
    chip.free("K", "V", "S, P", "new m, rescale");
  }
}

function* fa2(p, chip) {
  for (const rows of p.rowTiles()) {
    yield* onlineSoftmax(p, chip, rows, p.keyTilesFor(rows), 1);
    chip.store("O", p.wide(rows));
    chip.store("LSE", rows.size * SUM);
    yield [8, rows, null];
    chip.free("Q", "O", "m, l");
  }
}

function* splitKv(p, chip) {
  const perPiece = Math.ceil(Math.ceil(p.n / p.bk) / p.splits) * p.bk;
  const parts = pieces(0, p.n, perPiece);
  for (const part of parts) {
    for (const rows of p.rowTiles()) {
      const inside = p.keyTilesFor(rows).filter((c) => part.start <= c.start && c.start < part.stop);
      yield* onlineSoftmax(p, chip, rows, inside, 2);
      chip.store("partial O", rows.size * p.d * SUM);
      chip.store("partial LSE", rows.size * SUM);
      yield [8, rows, part];
      chip.free("Q", "O", "m, l");
    }
  }
  for (const rows of p.rowTiles()) {
    chip.alloc("O", rows.size * p.d * SUM);
    chip.alloc("m, l", 2 * rows.size * SUM);
    for (const part of parts) {
      chip.load("partial O", rows.size * p.d * SUM);
      chip.load("partial LSE", rows.size * SUM);
      chip.alloc("new m, rescale", 2 * rows.size * SUM);
      yield [10, rows, part];
    }
    chip.store("O", p.wide(rows));
    chip.store("LSE", rows.size * SUM);
    yield [11, rows, null];
    chip.free("O", "m, l", "partial O", "partial LSE", "new m, rescale");
  }
}

function* fa2Backward(p, chip) {
  for (const rows of p.rowTiles()) {
    chip.load("dO", p.wide(rows));
    chip.load("O", p.wide(rows));
    chip.store("delta", rows.size * SUM);
    yield [0, rows, null];
    chip.free("dO", "O");
  }
  for (const rows of p.rowTiles()) {
    chip.store("dQ sum", rows.size * p.d * SUM);
    yield [1, rows, null];
  }
  for (const cols of p.keyTiles()) {
    chip.load("K", p.wide(cols));
    chip.load("V", p.wide(cols));
    chip.alloc("dK, dV", 2 * cols.size * p.d * SUM);
    yield [3, null, cols];
    for (const rows of p.rowTilesFor(cols)) {
      chip.load("Q", p.wide(rows));
      chip.load("dO", p.wide(rows));
      chip.load("LSE", rows.size * SUM);
      chip.load("delta", rows.size * SUM);
      yield [5, rows, cols];
      chip.alloc("S, P, dS", 2 * rows.size * cols.size * SUM);
      yield [6, rows, cols];
      chip.load("dQ sum", rows.size * p.d * SUM);
      chip.store("dQ sum", rows.size * p.d * SUM);
      yield [9, rows, cols];
      chip.free("Q", "dO", "LSE", "delta", "S, P, dS", "dQ sum");
    }
    chip.store("dK", p.wide(cols));
    chip.store("dV", p.wide(cols));
    yield [10, null, cols];
    chip.free("K", "V", "dK, dV");
  }
  for (const rows of p.rowTiles()) {
    chip.load("dQ sum", rows.size * p.d * SUM);
    chip.store("dQ", p.wide(rows));
    yield [11, rows, null];
    chip.free("dQ sum");
  }
}

function loadRows(p, chip, rows) {
  for (const x of ["Q", "dO"]) chip.load(x, p.wide(rows));
  for (const x of ["LSE", "delta"]) chip.load(x, rows.size * SUM);
}

function* twoPassBackward(p, chip) {
  for (const rows of p.rowTiles()) {
    chip.load("dO", p.wide(rows));
    chip.load("O", p.wide(rows));
    chip.store("delta", rows.size * SUM);
    yield [0, rows, null];
    chip.free("dO", "O");
  }
  for (const cols of p.keyTiles()) {
    chip.load("K", p.wide(cols));
    chip.load("V", p.wide(cols));
    chip.alloc("dK, dV", 2 * cols.size * p.d * SUM);
    yield [2, null, cols];
    for (const rows of p.rowTilesFor(cols)) {
      loadRows(p, chip, rows);
      chip.alloc("S, P, dS", 2 * rows.size * cols.size * SUM);
      yield [4, rows, cols];
      chip.free("Q", "dO", "LSE", "delta", "S, P, dS");
    }
    chip.store("dK", p.wide(cols));
    chip.store("dV", p.wide(cols));
    yield [5, null, cols];
    chip.free("K", "V", "dK, dV");
  }
  for (const rows of p.rowTiles()) {
    loadRows(p, chip, rows);
    chip.alloc("dQ", rows.size * p.d * SUM);
    yield [7, rows, null];
    for (const cols of p.keyTilesFor(rows)) {
      chip.load("K", p.wide(cols));
      chip.load("V", p.wide(cols));
      chip.alloc("S, P, dS", 2 * rows.size * cols.size * SUM);
      yield [9, rows, cols];
      chip.free("K", "V", "S, P, dS");
    }
    chip.store("dQ", p.wide(rows));
    yield [10, rows, null];
    chip.free("Q", "dO", "LSE", "delta", "dQ");
  }
}

const SOFTMAX_3 = ["    row_max: read S", "    row_sum: read S", "    read S, store P = exp(S - max) / sum"];
const SOFTMAX_1 = ["    read rows of S once", "    row_max, row_sum", "    store P"];
const naiveCode = (softmax) => [
  "S = Q K^T:", "  load all of K", "  for rows: load Q", "    for cols: store S", "P = softmax(S), for rows:",
  ...softmax, "O = P V:", "  load all of V", "  for rows, for cols: load P", "    store O",
];

const SCHEDULES = {
  naive: { run: naive, products: 2, code: naiveCode(SOFTMAX_3) },
  "fused-softmax": { run: fusedSoftmax, products: 2, code: naiveCode(SOFTMAX_1) },
  fa1: {
    run: fa1, products: 2,
    code: [
      "for cols in key tiles:", "  load K, V", "  for rows in query tiles:", "    load Q", "    load O, m, l",
      "    S = scale Q K^T; new m; P = exp(S - m)", "    l = l exp(m - new m) + rowsum P",
      "    O = (old l O + P V) / new l", "    store O, m, l",
    ],
  },
  fa2: {
    run: fa2, products: 2,
    code: [
      "for rows in query tiles:", "  load Q", "  O, m, l = 0, -inf, 0", "  for cols in key tiles:", "    load K, V",
      "    S = scale Q K^T; new m; P = exp(S - m)", "    l = l exp(m - new m) + rowsum P",
      "    O = O exp(m - new m) + P V", "  store O / l and LSE",
    ],
  },
  "split-kv": {
    run: splitKv, products: 2,
    code: [
      "for piece of the keys:", "  for rows in query tiles:", "    load Q", "    O, m, l = 0, -inf, 0",
      "    for cols in the piece:", "      load K, V", "      S, P, l, O as in fa2", "",
      "    store partial O, partial LSE", "for rows: merge", "  for pieces: load partial O, LSE", "  store O and LSE",
    ],
  },
  "fa2 backward": {
    run: fa2Backward, products: 5,
    code: [
      "delta = rowsum(dO * O)", "dQ sum = 0", "for cols in key tiles:", "  load K, V; dK, dV = 0",
      "  for rows in query tiles:", "    load Q, dO, LSE, delta", "    P = exp(scale Q K^T - LSE); dV += P^T dO",
      "    dS = P (dO V^T - delta)", "    dK += scale dS^T Q", "    dQ sum += scale dS K, atomically",
      "  store dK, dV", "dQ = round(dQ sum)",
    ],
  },
  "two-pass backward": {
    run: twoPassBackward, products: 7,
    code: [
      "delta = rowsum(dO * O)", "for cols in key tiles:", "  load K, V; dK, dV = 0", "  for rows in query tiles:",
      "    load Q, dO, LSE, delta; P, dS; dV, dK += ...", "  store dK, dV", "for rows in query tiles:",
      "  load Q, dO, LSE, delta; dQ = 0", "  for cols in key tiles:", "    load K, V; P, dS again; dQ += ...", "  store dQ",
    ],
  },
};

// Runs a schedule to its end, or for a number of steps.
function runFor(problem, name, steps = Infinity) {
  const chip = new Chip();
  const lines = SCHEDULES[name].run(problem, chip);
  let at = null;
  let done = 0;
  while (done < steps) {
    const next = lines.next();
    if (next.done) return { chip, at: null, done, ended: true };
    at = next.value;
    done += 1;
  }
  return { chip, at, done, ended: false };
}

// FLOPs of the matrix products over the visited tiles.
function flopsOf(problem, name) {
  let pairs = 0;
  const skips = !["naive", "fused-softmax"].includes(name);
  for (const rows of problem.rowTiles()) {
    const tiles = skips ? problem.keyTilesFor(rows) : problem.keyTiles();
    pairs += rows.size * tiles.reduce((sum, c) => sum + c.size, 0);
  }
  return 2 * SCHEDULES[name].products * pairs * problem.d;
}
