"use strict";

const $ = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const COLOURS = { naive: "orange", "fused-softmax": "yellow", fa1: "pink", fa2: "blue", "split-kv": "green", "fa2 backward": "sky", "two-pass backward": "grey" };

function bytes(n) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (n >= size) return `${+(n / size).toPrecision(4)} ${unit}`;
  }
  return `${n} B`;
}

const state = { problem: null, name: "fa2", steps: 0, total: null, flops: 0, timer: null, run: null };

function fill(select, values, chosen) {
  for (const value of values) select.add(new Option(value, value, value === chosen, value === chosen));
}

function choose() {
  stop();
  const number = (id) => Number($(id).value);
  state.problem = new Problem({
    n: number("n"), d: number("d"), e: number("e"), bq: number("bq"), bk: number("bk"), causal: $("causal").checked,
  });
  state.name = $("schedule").value;
  state.total = runFor(state.problem, state.name);
  state.flops = flopsOf(state.problem, state.name);
  const items = SCHEDULES[state.name].code.map((text) => {
    const line = document.createElement("li");
    line.textContent = text || " ";
    return line;
  });
  $("code").replaceChildren(...items);
  drawRoofline();
  goTo(0);
}

// A schedule cannot run backwards, so going back runs it again; going on continues where it is.
function goTo(steps) {
  const wanted = Math.max(0, Math.min(steps, state.total.done));
  if (!state.run || wanted < state.steps || state.steps === 0) {
    const chip = new Chip();
    state.run = { chip, lines: SCHEDULES[state.name].run(state.problem, chip), at: null };
    state.steps = 0;
  }
  while (state.steps < wanted) {
    state.run.at = state.run.lines.next().value;
    state.steps += 1;
  }
  if (wanted === state.total.done && wanted > 0) {
    state.run.lines.next(); // what follows the last step frees the chip
    state.run.ended = true;
    state.run.at = null;
  }
  draw();
}

function draw() {
  const { chip, at } = state.run;
  $("progress").textContent = `step ${state.steps} of ${state.total.done}`;
  [...$("code").children].forEach((line, i) => line.classList.toggle("now", at !== null && at[0] === i));
  drawCounters(chip);
  drawChip(chip);
  drawGrid(at);
}

function drawCounters(chip) {
  const rows = [];
  for (const [tensor, whole] of state.total.chip.moved) {
    const moved = chip.moved.get(tensor) ?? { read: 0, written: 0 };
    const row = document.createElement("tr");
    row.dataset.tensor = tensor;
    const name = document.createElement("th");
    name.scope = "row";
    name.textContent = tensor;
    row.append(name);
    for (const n of [moved.read, moved.written, whole.read + whole.written]) {
      const cell = row.insertCell();
      cell.textContent = bytes(n);
      cell.dataset.bytes = n;
    }
    rows.push(row);
  }
  $("counters").tBodies[0].replaceChildren(...rows);
  const sums = { read: chip.total("read"), written: chip.total("written"), predicted: state.total.chip.total() };
  for (const [id, n] of Object.entries(sums)) {
    $(id).textContent = bytes(n);
    $(id).dataset.bytes = n;
  }
  const moved = sums.read + sums.written;
  const intensity = state.flops / sums.predicted;
  $("summary").textContent =
    `${bytes(moved)} of ${bytes(sums.predicted)} moved; ${+(state.flops / 1e9).toPrecision(4)} GFLOP, ` +
    `${+intensity.toPrecision(3)} FLOP per byte. Q, K, V and O once each: ${bytes(4 * state.problem.n * state.problem.d * state.problem.e)}.`;
}

function drawChip(chip) {
  const capacity = Number($("sram").value) * 1024;
  const over = state.total.chip.peak > capacity;
  $("chip-used").textContent =
    `${bytes(chip.used)} of ${bytes(capacity)}; at most ${bytes(state.total.chip.peak)}${over ? ": does not fit" : ""}`;
  $("chip-used").className = over ? "wrong" : "";
  $("chip-used").dataset.peak = state.total.chip.peak;
  $("chip-bar").style.width = `${Math.min(100, (100 * chip.used) / capacity)}%`;
  $("chip-bar").className = chip.used > capacity ? "over" : "";
  const tiles = [...chip.tiles].map(([name, n]) => {
    const item = document.createElement("li");
    item.textContent = `${name} ${bytes(n)}`;
    return item;
  });
  $("tiles").replaceChildren(...tiles);
}

// The matrix with a strip of Q and O to its left and one of K and V above it.
function drawGrid(at) {
  const canvas = $("grid");
  const scale = window.devicePixelRatio || 1;
  const side = canvas.clientWidth;
  canvas.width = canvas.height = Math.round(side * scale);
  const c = canvas.getContext("2d");
  c.scale(scale, scale);
  const strip = 22;
  const p = state.problem;
  const x = (key) => strip + ((side - strip) * key) / p.n;
  const skips = !["naive", "fused-softmax"].includes(state.name);
  c.fillStyle = colour("panel");
  c.fillRect(0, 0, side, side);
  for (const rows of p.rowTiles()) {
    const tiles = skips ? p.keyTilesFor(rows) : p.keyTiles();
    const stop = tiles.length ? tiles[tiles.length - 1].stop : 0;
    c.fillStyle = colour("line");
    c.fillRect(x(0), x(rows.start), x(stop) - x(0), x(rows.stop) - x(rows.start));
  }
  drawLines(c, p, x, strip, side);
  const [, rows, cols] = at ?? [0, null, null];
  if (rows) {
    c.fillStyle = colour("blue");
    c.fillRect(0, x(rows.start), strip - 2, Math.max(5, x(rows.stop) - x(rows.start)));
  }
  if (cols) {
    c.fillStyle = colour("green");
    c.fillRect(x(cols.start), 0, Math.max(5, x(cols.stop) - x(cols.start)), strip - 2);
  }
  if (rows && cols) {
    c.fillStyle = colour("orange");
    c.fillRect(x(cols.start), x(rows.start), Math.max(5, x(cols.stop) - x(cols.start)), Math.max(5, x(rows.stop) - x(rows.start)));
  }
  $("legend").textContent = "Left: query rows, above: keys in use; the marked tile is being worked on. Empty tiles are skipped.";
}

function drawLines(c, p, x, strip, side) {
  c.strokeStyle = colour("paper");
  c.lineWidth = 1;
  c.beginPath();
  for (const [block, count] of [[p.bk, p.n / p.bk], [p.bq, p.n / p.bq]]) {
    if (count > 32) continue; // lines closer than a few pixels would be grey
    for (let at = block; at < p.n; at += block) {
      const [from, to] = block === p.bk ? [[x(at), strip], [x(at), side]] : [[strip, x(at)], [side, x(at)]];
      c.moveTo(...from);
      c.lineTo(...to);
      if (p.bk === p.bq) {
        c.moveTo(strip, x(at));
        c.lineTo(side, x(at));
      }
    }
  }
  c.stroke();
}

function drawRoofline() {
  const svg = $("roofline");
  const width = svg.clientWidth < 560 ? 430 : 760; // a narrow drawing keeps its letters readable on a phone
  svg.setAttribute("viewBox", `0 0 ${width} 400`);
  const machine = DATA.machines.find((m) => m.name === $("machine").value);
  const peak = state.problem.e === 2 ? machine.peak16 : machine.peak32;
  const measured = $("show-measured").checked ? measuredOn(machine) : [];
  const points = Object.keys(SCHEDULES).map((name) => {
    const intensity = flopsOf(state.problem, name) / runFor(state.problem, name).chip.total();
    return { name, intensity, rate: Math.min(peak, intensity * machine.bandwidth) };
  });
  const ridge = peak / machine.bandwidth;
  const shown = [...points.map((p) => p.intensity), ...measured.map((m) => m.intensity), ridge];
  const [low, high] = [Math.min(...shown) / 3, Math.max(...shown) * 4];
  // Room above the roof for the list of names, which takes more of a narrow drawing.
  const [bottom, top] = [low * machine.bandwidth, peak * (width < 500 ? 200 : 20)];
  const X = (i) => 60 + ((width - 80) * Math.log(i / low)) / Math.log(high / low);
  const Y = (r) => 350 - (330 * Math.log(r / bottom)) / Math.log(top / bottom);
  const parts = [axes(low, high, bottom, top, X, Y, width)];
  parts.push(`<path d="M${X(low)},${Y(bottom)} L${X(ridge)},${Y(peak)} L${X(high)},${Y(peak)}" fill="none" stroke="${colour("ink")}" stroke-width="2.5"/>`);
  parts.push(`<text x="${X(high)}" y="${Y(peak) - 8}" text-anchor="end">${+(peak / 1e12).toPrecision(4)} TFLOP/s</text>`);
  parts.push(`<line x1="${X(ridge)}" x2="${X(ridge)}" y1="${Y(peak)}" y2="350" stroke="${colour("soft")}" stroke-dasharray="3 4"/>`);
  parts.push(`<text x="${X(ridge) + 5}" y="342">ridge ${Math.round(ridge)}</text>`);
  points.forEach((p, i) => parts.push(mark(p, i, X, Y)));
  measured.forEach((m) => parts.push(measuredMark(m, X(m.intensity), Y(m.rate))));
  svg.innerHTML = parts.join("");
  $("roofline-text").textContent =
    `${machine.title}, ${+(machine.bandwidth / 1e12).toPrecision(3)} TB/s, if every byte counted goes to slow memory. ` +
    (measured.length ? measuredText(measured) : "No measured points of this width for this machine.");
  listMeasured(measured);
}

// A point belongs to the roof of its own width: a 16-bit one would stand above the 32-bit roof.
function measuredOn(machine) {
  return DATA.measured.filter((m) => m.machine === machine.name && (m.itemsize === 2) === (state.problem.e === 2));
}

function measuredText(measured) {
  const counted = measured.filter((m) => m.counted).length;
  const rest = measured.length - counted;
  return (rest ? `${rest} measured points (+), at their compulsory bytes; ours in blue. ` : "") +
    (counted ? `${counted} with bytes counted by the GPU (×), caches cold.` : "");
}

const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

function measuredMark(m, x, y) {
  const text = `${m.implementation}: ${m.case}, ${m.direction}, ${+(m.rate / 1e12).toPrecision(4)} TFLOP/s`;
  const path = m.counted ? `M${x - 4},${y - 4}l8,8M${x - 4},${y + 4}l8,-8` : `M${x - 5},${y}h10M${x},${y - 5}v10`;
  const ours = m.implementation.startsWith("ioattn");
  return `<g stroke="${colour(ours ? "blue" : "ink")}" stroke-width="${ours ? 2.4 : 1.4}"><path d="${path}"/><title>${escaped(text)}</title></g>`;
}

function listMeasured(measured) {
  const rows = measured.map((m) => {
    const row = document.createElement("tr");
    const cells = [m.case, m.direction, m.implementation, +(m.rate / 1e12).toPrecision(4), +m.intensity.toPrecision(3)];
    cells.forEach((text, i) => {
      const cell = document.createElement(i ? "td" : "th");
      cell.textContent = text;
      row.append(cell);
    });
    return row;
  });
  $("measured").tBodies[0].replaceChildren(...rows);
}

function axes(low, high, bottom, top, X, Y, width) {
  const lines = [];
  for (let i = 10 ** Math.ceil(Math.log10(low)); i < high; i *= 10) {
    lines.push(`<line x1="${X(i)}" x2="${X(i)}" y1="20" y2="350" stroke="${colour("line")}"/><text x="${X(i)}" y="370" text-anchor="middle">${i}</text>`);
  }
  for (let r = 10 ** Math.ceil(Math.log10(bottom)); r < top; r *= 10) {
    lines.push(`<line x1="60" x2="${width - 20}" y1="${Y(r)}" y2="${Y(r)}" stroke="${colour("line")}"/><text x="54" y="${Y(r) + 4}" text-anchor="end">${r / 1e12}</text>`);
  }
  lines.push(`<text x="${width / 2}" y="394" text-anchor="middle">FLOP per byte of slow memory</text>`);
  lines.push(`<text x="66" y="16">TFLOP/s</text>`);
  return lines.join("");
}

// Points crowd on the roof, so their names stand in a list, in the points' colours; the chosen one is larger.
function mark(point, i, X, Y) {
  const chosen = point.name === state.name;
  const style = `fill="${colour(COLOURS[point.name])}" stroke="${colour("paper")}" stroke-width="1.5"`;
  const text = `${point.name}: ${+(point.rate / 1e12).toPrecision(3)} TFLOP/s at ${+point.intensity.toPrecision(3)}`;
  const y = 40 + 24 * i;
  return `<circle cx="${X(point.intensity)}" cy="${Y(point.rate)}" r="${chosen ? 10 : 6}" ${style}/>` +
    `<circle cx="78" cy="${y - 5}" r="6" ${style}/><text x="92" y="${y}" font-weight="${chosen ? 700 : 400}">${text}</text>`;
}

function stop() {
  clearInterval(state.timer);
  state.timer = null;
  $("play").textContent = "Play";
  $("play").setAttribute("aria-pressed", "false");
}

function play() {
  if (state.timer) return stop();
  if (state.steps >= state.total.done) goTo(0);
  $("play").textContent = "Pause";
  $("play").setAttribute("aria-pressed", "true");
  const stride = Math.max(1, Math.round(state.total.done / 600));
  state.timer = setInterval(() => {
    goTo(state.steps + stride);
    if (state.steps >= state.total.done) stop();
  }, 60);
}

const online = { shown: 0 };

function drawOnline() {
  const update = $("update").value;
  const rows = onlineRows(update);
  const truth = trueOutput();
  $("rule").textContent = UPDATES[update].rule;
  const drawn = rows.map((row, i) => {
    const line = document.createElement("tr");
    const cells = [row.scores.join(", "), row.rescale.toFixed(4), row.m.toFixed(1), row.l.toFixed(4), row.o.toFixed(4), row.out.toFixed(4)];
    cells.forEach((text, k) => {
      const cell = document.createElement(k ? "td" : "th");
      cell.textContent = k && i >= online.shown ? "" : text;
      line.append(cell);
    });
    line.classList.toggle("now", i === online.shown - 1);
    return line;
  });
  $("online").tBodies[0].replaceChildren(...drawn);
  const last = rows[rows.length - 1].out;
  const right = Math.abs(last - truth) < 1e-9;
  const verdict = $("online-verdict");
  verdict.textContent = online.shown < rows.length ? "" : `O = ${last.toFixed(4)}, softmax of all keys at once: ${truth.toFixed(4)}: ${right ? "the same" : "WRONG"}`;
  verdict.className = right ? "right" : "wrong";
}

function start() {
  fill($("schedule"), Object.keys(SCHEDULES), "fa2");
  fill($("n"), [256, 512, 1024, 2048, 4096, 8192], 4096);
  fill($("d"), [32, 64, 128, 256], 64);
  for (const id of ["bq", "bk"]) fill($(id), [16, 32, 64, 128, 256], 64);
  fill($("machine"), DATA.machines.map((m) => m.name), "h100");
  for (const [name, { title }] of Object.entries(UPDATES)) $("update").add(new Option(title, name));
  for (const id of ["schedule", "n", "d", "e", "bq", "bk", "causal"]) $(id).addEventListener("change", choose);
  $("sram").addEventListener("input", draw);
  $("machine").addEventListener("change", () => {
    const machine = DATA.machines.find((m) => m.name === $("machine").value);
    $("sram").value = machine.sram / 1024;
    drawRoofline();
    draw();
  });
  $("show-measured").addEventListener("change", drawRoofline);
  const actions = { home: () => goTo(0), back: () => goTo(state.steps - 1), step: () => goTo(state.steps + 1), end: () => goTo(state.total.done), play };
  for (const [id, action] of Object.entries(actions)) {
    $(id).addEventListener("click", () => {
      if (id !== "play") stop();
      action();
    });
  }
  document.addEventListener("keydown", (event) => {
    // Lists, fields and focused buttons keep their own keys.
    const keys = { ArrowRight: "step", ArrowLeft: "back", End: "end", Home: "home", " ": "play" };
    const tag = event.target.tagName;
    if (!(event.key in keys) || tag === "SELECT" || tag === "INPUT" || (/BUTTON|SUMMARY/.test(tag) && event.key === " ")) return;
    event.preventDefault();
    $(keys[event.key]).click();
  });
  $("update").addEventListener("change", drawOnline);
  $("online-step").addEventListener("click", () => {
    online.shown = Math.min(SCORES.length, online.shown + 1);
    drawOnline();
  });
  $("online-reset").addEventListener("click", () => {
    online.shown = 0;
    drawOnline();
  });
  const redraw = () => {
    draw();
    drawRoofline();
  };
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  window.addEventListener("resize", redraw);
  choose();
  drawOnline();
}

start();
