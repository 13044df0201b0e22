// Draws an episode (replay.episode): requests in rows, of which the first few came before the part shown and only are drawn.

const FETCH = 1;
const REJECTED_AT_ARRIVAL = 1, REJECTED_AT_DECODE = 2;
const GOOD = 0, ENDS = [["good", "c2"], ["rejected at arrival", "c7"], ["rejected at decode", "c1"], ["TTFT violated", "c4"], ["TBT violated", "c5"]];
const LISTED = 100, FIRST = 5; // rows of the tables
const GUTTER = 46, AXIS = 18, STRIP = 36, CURVE = 52, CROWD = 24, LINKS = 80;
const NEAR = 6; // pixels
let E, R, policies, count, base, prefills, decodes, whole_s, view, chosen = -1, views = [], waiting = false;

// --- the episode

async function read() {
  const letters = atob(at("episode").textContent), packed = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) packed[i] = letters.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function endOf(o, i) {
  if (o.status[i] === REJECTED_AT_ARRIVAL) return 1;
  if (o.status[i] === REJECTED_AT_DECODE) return 2;
  if (o.good[i]) return GOOD;
  return o.ttft_s[i] > E.ttft_slo_s ? 3 : 4;
}
const leftAt = (o, i) => o.finish_s[i] ?? o.kv_ready_s[i] ?? o.prefill_end_s[i] ?? R.arrival_s[i];
const seen = (policy, name, instance, i) => policy.seen[name][instance * (count - base) + i - base];
const blocksOf = (i) => Math.ceil(R.input_tokens[i] / E.block_tokens);
const range = (size) => [...Array(size).keys()];
const times = (n, what) => `${whole(n)} ${what}${n === 1 ? "" : "s"}`;

// Running sums of events [time, change of one, change of the other].
function steps(events) {
  events.sort((a, b) => a[0] - b[0]);
  let first = 0, second = 0;
  return events.map(([t, x, y]) => [t, first += x, second += y]);
}

function prepare(policy) {
  const o = policy.outcomes;
  policy.end = range(count).map((i) => endOf(o, i));
  policy.of = range(prefills).map(() => []);
  policy.batch = range(decodes).map(() => []);
  policy.on = range(decodes).map(() => []);
  const streams = [];
  for (let i = 0; i < count; i++) {
    if (o.prefill[i] < 0) continue;
    policy.of[o.prefill[i]].push(i);
    policy.on[o.decode[i]].push(i);
    if (o.kv_ready_s[i] !== null) streams.push([o.prefill_start_s[i], 1, 0], [o.kv_ready_s[i], -1, 0]);
    if (o.join_s[i] === null || o.finish_s[i] === null) continue;
    const tokens = R.input_tokens[i] + R.output_tokens[i];
    policy.batch[o.decode[i]].push([o.join_s[i], 1, tokens], [o.finish_s[i], -1, -tokens]);
  }
  policy.of.forEach((list) => list.sort((a, b) => o.prefill_start_s[a] - o.prefill_start_s[b]));
  policy.on.forEach((list) => list.sort((a, b) => o.join_s[a] - o.join_s[b]));
  policy.batch = policy.batch.map(steps);
  policy.streams = steps(streams);
  const sum = (name, size) => (i) => range(size).reduce((total, j) => total + seen(policy, name, j, i), 0);
  const queue = sum("queue_ms", prefills), batch = sum("batch", decodes), rows = range(count - base).map((k) => k + base);
  const rejected = rows.filter((i) => o.status[i] === REJECTED_AT_ARRIVAL || o.status[i] === REJECTED_AT_DECODE).map((i) => [leftAt(o, i), 1, 0]);
  policy.curves = [
    rows.map((i) => [R.arrival_s[i], queue(i) / 1e3]),
    rows.map((i) => [R.arrival_s[i], batch(i)]),
    rows.map((i) => [R.arrival_s[i], seen(policy, "in_flight", 0, i)]),
    steps(rejected),
  ];
}

// --- colours, which a canvas has to be told

const colours = new Map();
function ink(name) {
  if (!colours.has(name)) {
    at("probe").style.color = `var(--${name})`;
    colours.set(name, getComputedStyle(at("probe")).color);
  }
  return colours.get(name);
}

// --- the timeline

const CURVES = ["queued prefill, s", "requests in a batch", "in flight", "rejected so far"];
const pen = (canvas, height) => {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const c = canvas.getContext("2d");
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.clearRect(0, 0, width, height);
  c.font = "11px system-ui, sans-serif";
  c.textBaseline = "middle";
  return c;
};
const across = (canvas) => scaleOf(GUTTER, canvas.clientWidth - 4, view.from, view.to);
const scaleOf = (from, to, low, high) => (v) => from + (to - from) * (v - low) / (high - low);

function axis(c, width, height, x) {
  const target = (view.to - view.from) / Math.max(2, (width - GUTTER) / 110), power = 10 ** Math.floor(Math.log10(target));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= target);
  for (let k = Math.ceil(view.from / step); k * step <= view.to; k++) {
    line(c, "line", [[x(k * step), AXIS], [x(k * step), height]]);
    c.fillStyle = ink("faint");
    c.textAlign = "center";
    const text = `${Number((k * step).toFixed(6))} s`, half = c.measureText(text).width / 2;
    c.fillText(text, Math.min(width - half, Math.max(GUTTER + half - 10, x(k * step))), AXIS / 2);
  }
}
function line(c, colour, points, width = 1, dashes = []) {
  c.beginPath();
  points.forEach(([x, y], i) => i ? c.lineTo(x, y) : c.moveTo(x, y));
  c.strokeStyle = ink(colour);
  c.lineWidth = width;
  c.setLineDash(dashes);
  c.stroke();
  c.setLineDash([]);
}
function box(c, colour, x, y, width, height, alpha = 1) {
  c.globalAlpha = alpha;
  c.fillStyle = ink(colour);
  c.fillRect(x, y, Math.max(1, width), height);
  c.globalAlpha = 1;
}
function label(c, text, y, colour = "faint") {
  c.fillStyle = ink(colour);
  c.textAlign = "left";
  c.fillText(text, 2, y);
}
// A staircase of [time, ..., value at `field`] over what is shown; where it `ends`, no further than its last event.
function stairs(c, colour, events, field, x, y, fillTo, ends = false) {
  let value = 0, k = 0;
  while (k < events.length && events[k][0] <= view.from) value = events[k++][field];
  const points = [[GUTTER, y(value)]];
  for (; k < events.length && events[k][0] <= view.to; k++) {
    const at_x = x(events[k][0]);
    points.push([at_x, y(value)], [at_x, y(events[k][field])]);
    value = events[k][field];
  }
  if (!ends || k < events.length) points.push([x(view.to), y(value)]);
  if (fillTo !== undefined) {
    c.beginPath();
    c.moveTo(GUTTER, fillTo);
    for (const [px, py] of points) c.lineTo(px, py);
    c.lineTo(x(view.to), fillTo);
    c.globalAlpha = 0.3;
    c.fillStyle = ink(colour);
    c.fill();
    c.globalAlpha = 1;
  }
  line(c, colour, points, 1.2);
}
const atChosen = (c, x, height) => {
  if (chosen >= 0) line(c, "ink", [[x(R.arrival_s[chosen]), AXIS], [x(R.arrival_s[chosen]), height]], 1, [2, 3]);
};

function drawCurves() {
  const canvas = at("curves"), height = AXIS + CURVE * CURVES.length + 4, c = pen(canvas, height), x = across(canvas);
  axis(c, canvas.clientWidth, height, x);
  CURVES.forEach((name, j) => {
    const top = AXIS + CURVE * j + 12, bottom = AXIS + CURVE * (j + 1) - 2;
    const most = Math.max(1e-9, ...policies.map((p) => p.curves[j].reduce((m, e) => Math.max(m, e[1]), 0)));
    const y = scaleOf(bottom, top, 0, most);
    policies.forEach((policy, i) => stairs(c, `c${i}`, policy.curves[j], 1, x, y, undefined, j < 3));
    line(c, "line", [[0, bottom + 1], [canvas.clientWidth, bottom + 1]]);
    label(c, name, top - 6);
    label(c, most < 10 ? most.toFixed(1) : whole(most), top + 6);
    label(c, "0", bottom - 6);
  });
  atChosen(c, x, height);
}

// Lanes of a policy from top to bottom: [kind, instance, label, y, height].
function laneList() {
  const tall = prefills + decodes > CROWD ? 20 : 30;
  const kinds = [["arrivals", 0, "arrivals", STRIP], ["ttft", 0, "TTFT", STRIP], ["tbt", 0, "TBT", STRIP]];
  for (const p of range(prefills)) kinds.push(["prefill", p, `p${p}`, tall]);
  kinds.push(["transfers", 0, "KV sent", STRIP]);
  for (const d of range(decodes)) kinds.push(["decode", d, `d${d}`, tall]);
  let y = AXIS;
  return kinds.map(([kind, instance, name, height]) => ({ kind, instance, name, y: (y += height + 2) - height - 2, height }));
}
const within = (since, until) => since !== null && until !== null && until >= view.from && since <= view.to;
const rows = (lane) => Math.min(5, Math.floor((lane.height - 10) / 3)); // of waiting requests, above those that run
const barTop = (lane) => lane.y + 2 * rows(lane) + 2;

function drawLanes({ canvas, policy, lanes }) {
  const o = policy.outcomes, width = canvas.clientWidth, height = lanes.at(-1).y + lanes.at(-1).height + 4;
  const c = pen(canvas, height), x = across(canvas);
  axis(c, width, height, x);
  c.save();
  c.beginPath();
  c.rect(GUTTER, 0, width - GUTTER, height);
  c.clip();
  for (const lane of lanes) DRAW[lane.kind](c, lane, policy, x, width);
  links(c, policy, lanes, x);
  atChosen(c, x, height);
  c.restore();
  for (const lane of lanes) {
    line(c, "line", [[0, lane.y + lane.height + 1], [width, lane.y + lane.height + 1]]);
    label(c, lane.name, lane.y + lane.height / 2, "ink");
  }
}

function ratios(c, lane, policy, x, values, slo) {
  const y = scaleOf(lane.y + lane.height - 2, lane.y + 2, 0, 1.5);
  line(c, "over", [[GUTTER, y(1)], [x(view.to), y(1)]], 1, [4, 3]);
  for (let i = base; i < count; i++) {
    if (values[i] === null || !within(R.arrival_s[i], R.arrival_s[i])) continue;
    box(c, values[i] > slo ? "over" : "c2", x(R.arrival_s[i]) - 1, y(Math.min(1.5, values[i] / slo)) - 1, 2, 2, 0.8);
  }
}

const DRAW = {
  arrivals(c, lane, policy, x, width) {
    const bin = 4, bins = range(Math.ceil((width - GUTTER) / bin)).map(() => ENDS.map(() => 0));
    for (let i = base; i < count; i++) {
      const k = Math.floor((x(R.arrival_s[i]) - GUTTER) / bin);
      if (k >= 0 && k < bins.length) bins[k][policy.end[i]]++;
    }
    const most = Math.max(1, ...bins.map((b) => b.reduce((a, n) => a + n, 0)));
    bins.forEach((b, k) => {
      let y = lane.y + lane.height;
      b.forEach((n, end) => {
        const h = (lane.height - 2) * n / most;
        if (n) box(c, ENDS[end][1], GUTTER + k * bin, y -= h, bin - 0.5, h);
      });
    });
  },
  ttft: (c, lane, policy, x) => ratios(c, lane, policy, x, policy.outcomes.ttft_s, E.ttft_slo_s),
  tbt: (c, lane, policy, x) => ratios(c, lane, policy, x, policy.outcomes.tbt_s, E.tbt_slo_s),
  prefill(c, lane, policy, x) {
    const o = policy.outcomes, top = barTop(lane), tall = lane.y + lane.height - 1 - top;
    policy.of[lane.instance].forEach((i, order) => {
      const start = o.prefill_start_s[i], end = o.prefill_end_s[i];
      if (within(R.arrival_s[i], start) && start > R.arrival_s[i])
        box(c, policy.end[i] === GOOD ? "faint" : "over", x(R.arrival_s[i]), lane.y + 1 + 2 * (order % rows(lane)), x(start) - x(R.arrival_s[i]), 1.2, 0.7);
      if (!within(start, end)) return;
      const reused = tall * o.reused_tokens[i] / R.input_tokens[i], w = x(end) - x(start) - 0.5;
      box(c, "c0", x(start), top, w, tall - reused, 0.75);
      if (reused > 0) box(c, "c2", x(start), top + tall - reused, w, reused, 0.85);
      if (policy.end[i] !== GOOD) box(c, "over", x(start), top - 1, w, 2);
    });
  },
  transfers(c, lane, policy, x) {
    const o = policy.outcomes, bottom = lane.y + lane.height;
    const most = Math.max(1, ...policy.streams.map((s) => s[1]));
    stairs(c, "c6", policy.streams, 1, x, scaleOf(bottom, lane.y + 3, 0, most), bottom);
    const moved = Math.max(1, ...o.fetched_blocks);
    for (let i = 0; i < count; i++) if (o.source[i] === FETCH && within(R.arrival_s[i], R.arrival_s[i]))
      box(c, "c3", x(R.arrival_s[i]) - 0.75, lane.y + 2, 1.5, Math.max(3, (lane.height - 4) * o.fetched_blocks[i] / moved), 0.8);
  },
  decode(c, lane, policy, x) {
    const o = policy.outcomes, bottom = lane.y + lane.height - 1;
    stairs(c, "c6", policy.batch[lane.instance], 1, x, scaleOf(bottom, lane.y + 4, 0, policy.mostBatch), bottom);
    stairs(c, "c3", policy.batch[lane.instance], 2, x, scaleOf(bottom, lane.y + 4, 0, E.kv_capacity_tokens[lane.instance]));
    for (const i of policy.on[lane.instance]) {
      const until = o.join_s[i];
      if (within(o.kv_ready_s[i], until) && until > o.kv_ready_s[i]) box(c, "faint", x(o.kv_ready_s[i]), lane.y + 1, x(until) - x(o.kv_ready_s[i]), 1.5);
      if (o.status[i] === REJECTED_AT_DECODE && within(o.kv_ready_s[i], o.kv_ready_s[i])) box(c, "c1", x(o.kv_ready_s[i]) - 1.5, lane.y, 3, lane.height);
    }
  },
};

// Where KV goes, of the chosen request, and of all where few enough are shown.
function links(c, policy, lanes, x) {
  const o = policy.outcomes, of = (kind, instance) => lanes.find((lane) => lane.kind === kind && lane.instance === instance);
  const shown = range(count).filter((i) => o.prefill[i] >= 0 && within(R.arrival_s[i], leftAt(o, i)) && R.arrival_s[i] >= view.from);
  for (const i of shown.length <= LINKS ? shown : []) link(i, 1, 0.45);
  if (chosen >= 0 && o.prefill[chosen] >= 0) link(chosen, 2.2, 1);
  function link(i, thick, alpha) {
    const p = of("prefill", o.prefill[i]), d = of("decode", o.decode[i]), start = o.prefill_start_s[i], end = o.prefill_end_s[i];
    c.globalAlpha = alpha;
    if (o.source[i] === FETCH && o.holder[i] >= 0) line(c, "c3", [[x(R.arrival_s[i]), of("prefill", o.holder[i]).y + p.height - 6], [x(start), p.y + p.height - 6]], thick);
    if (o.kv_ready_s[i] !== null && end !== null) line(c, "c6", [[x(end), p.y + p.height - 2], [x(o.kv_ready_s[i]), d.y + d.height / 2]], thick);
    c.globalAlpha = 1;
    if (i !== chosen) return;
    if (start > R.arrival_s[i]) line(c, "ink", [[x(R.arrival_s[i]), barTop(p) - 2], [x(start), barTop(p) - 2]], 2);
    c.strokeStyle = ink("ink");
    c.lineWidth = 2;
    if (end !== null) c.strokeRect(x(start), barTop(p), Math.max(2, x(end) - x(start)), p.y + p.height - 1 - barTop(p));
    if (o.finish_s[i] !== null && o.join_s[i] !== null) line(c, "ink", [[x(o.join_s[i]), d.y + d.height / 2], [x(o.finish_s[i]), d.y + d.height / 2]], 3);
  }
}

// Which request is at a place of a policy's lanes; -1 for none.
function requestAt({ canvas, policy, lanes }, px, py) {
  const lane = lanes.find((l) => py >= l.y && py < l.y + l.height + 2), o = policy.outcomes, x = across(canvas);
  if (!lane || px < GUTTER) return -1;
  let best = -1, least = NEAR;
  const offer = (i, distance) => { if (distance < least) { least = distance; best = i; } };
  const outside = (since, until) => since === null || until === null ? Infinity : Math.max(0, x(since) - px, px - x(until));
  if (lane.kind === "prefill") {
    const running = py >= barTop(lane) - 1;
    policy.of[lane.instance].forEach((i, order) => {
      if (running) offer(i, outside(o.prefill_start_s[i], o.prefill_end_s[i]));
      else offer(i, outside(R.arrival_s[i], o.prefill_start_s[i]) + Math.abs(py - lane.y - 1.6 - 2 * (order % rows(lane))));
    });
  } else if (lane.kind === "decode") {
    for (const i of policy.on[lane.instance]) offer(i, o.join_s[i] === null ? outside(o.kv_ready_s[i], o.kv_ready_s[i]) : Math.abs(x(o.join_s[i]) - px));
  } else {
    const slo = { ttft: [o.ttft_s, E.ttft_slo_s], tbt: [o.tbt_s, E.tbt_slo_s] }[lane.kind];
    const y = scaleOf(lane.y + lane.height - 2, lane.y + 2, 0, 1.5);
    for (let i = base; i < count; i++) {
      if (lane.kind === "transfers" && o.source[i] !== FETCH) continue;
      const off = slo ? slo[0][i] === null ? Infinity : Math.abs(y(Math.min(1.5, slo[0][i] / slo[1])) - py) : 0;
      offer(i, Math.hypot(x(R.arrival_s[i]) - px, off));
    }
  }
  return best;
}

// --- moving in time

function look(from, to) {
  const shortest = Math.min(0.5, whole_s.to - whole_s.from), span = Math.min(whole_s.to - whole_s.from, Math.max(shortest, to - from));
  const middle = (from + to) / 2;
  view.from = Math.min(whole_s.to - span, Math.max(whole_s.from, middle - span / 2));
  view.to = view.from + span;
  redraw();
}
const zoom = (factor, around = (view.from + view.to) / 2) => look(around - (around - view.from) * factor, around + (view.to - around) * factor);
const move = (share) => { const by = share * (view.to - view.from); look(view.from + by, view.to + by); };
const MOVES = {
  in: () => zoom(0.5), out: () => zoom(2), earlier: () => move(-0.25), later: () => move(0.25), all: () => look(whole_s.from, whole_s.to),
};
const KEYS = { "+": "in", "=": "in", "-": "out", ArrowLeft: "earlier", ArrowRight: "later", 0: "all", Home: "all" };

function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    drawCurves();
    views.forEach(drawLanes);
    at("shown").textContent = `${view.from.toFixed(1)} to ${view.to.toFixed(1)} s`;
  });
}

function movable(canvas, under) {
  const held = new Map();
  let moved = 0;
  const timeAt = (px) => view.from + (px - GUTTER) / (canvas.clientWidth - 4 - GUTTER) * (view.to - view.from);
  canvas.addEventListener("keydown", (event) => {
    const name = KEYS[event.key];
    if (!name || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    MOVES[name]();
  });
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey) zoom(Math.exp(event.deltaY / 300), timeAt(event.offsetX));
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move((event.deltaX || event.deltaY) / canvas.clientWidth);
    else return;
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    held.set(event.pointerId, event.offsetX);
    moved = 0;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held.has(event.pointerId)) return under?.(event.offsetX, event.offsetY, false);
    const before = [...held.values()], by = event.offsetX - held.get(event.pointerId);
    held.set(event.pointerId, event.offsetX);
    moved += Math.abs(by);
    if (held.size === 1 && moved > 3) move(-by / (canvas.clientWidth - 4 - GUTTER));
    if (held.size === 2) {
      const [a, b] = [...held.values()], was = Math.abs(before[0] - before[1]), is = Math.abs(a - b);
      if (was > 5 && is > 5) zoom(was / is, timeAt((a + b) / 2));
    }
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => {
    held.delete(event.pointerId);
    if (end === "pointerup" && moved <= 3) under?.(event.offsetX, event.offsetY, true);
  });
}

function timeline() {
  whole_s = { from: E.start_s, to: 0 };
  for (const policy of policies) for (let i = base; i < count; i++) whole_s.to = Math.max(whole_s.to, leftAt(policy.outcomes, i));
  if (whole_s.to - whole_s.from < 0.1) whole_s.to = whole_s.from + 0.1;
  view = { ...whole_s };
  const most = Math.max(1, ...policies.flatMap((p) => p.batch.flatMap((list) => list.map((s) => s[1]))));
  for (const policy of policies) {
    policy.mostBatch = most;
    const box = element("div"), figure = element("figure"), canvas = element("canvas", "", { tabindex: 0, role: "img", "aria-describedby": "hint" });
    const s = policy.score, busy = s.prefill_busy.map((v, p) => `p${p} ${percent(v)}`).join(", "), batches = s.decode_batch.map((v, d) => `d${d} ${fixed(1)(v)}`).join(", ");
    canvas.setAttribute("aria-label", `Lanes of ${policy.name}: arrivals, TTFT and TBT against their SLOs, ${prefills} prefill instances (busy ${busy}), KV sent, ${decodes} decode instances (mean batch ${batches})`);
    figure.append(canvas);
    box.append(element("h3", policy.name), figure);
    at("lanes").append(box);
    const one = { canvas, policy, lanes: laneList() };
    views.push(one);
    movable(canvas, (px, py, click) => {
      const i = requestAt(one, px, py);
      if (click && i >= 0) choose(i);
      at("under").textContent = i < 0 ? " " : `${policy.name}: request ${R.number[i]}, ${short(R.arrival_s[i])} s, ${whole(R.input_tokens[i])} tokens: ${ENDS[policy.end[i]][0]}, TTFT ${seconds(policy.outcomes.ttft_s[i])}, TBT ${seconds(policy.outcomes.tbt_s[i])}`;
    });
  }
  const peak = (policy, j) => short(policy.curves[j].reduce((m, e) => Math.max(m, e[1]), 0));
  at("curves").setAttribute("aria-label", `The cluster over time. ${policies.map((p) => `${p.name}: ${CURVES.map((name, j) => `${name} up to ${peak(p, j)}`).join(", ")}`).join("; ")}`);
  policies.forEach((policy, i) => key("curves-key", `c${i}`, policy.name));
  movable(at("curves"));
  for (const [name, act] of Object.entries(MOVES)) at(name).addEventListener("click", act);
  const keys = [
    ...ENDS.map(([name, colour]) => [colour, `arrival: ${name}`]),
    ["faint", "waiting for prefill, or for its batch"], ["c0", "prefill: computed"], ["c2", "prefill: reused from cache"], ["over", "missed an SLO, or its limit"],
    ["c6", "KV streams under way; a batch"], ["c3", "a fetch between prefill instances; KV room taken in decode"],
  ];
  for (const [colour, text] of keys) key("keys", colour, text);
  new ResizeObserver(redraw).observe(at("curves"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colours.clear(); redraw(); });
}
function key(id, colour, text) {
  const entry = element("li"), svg = shape("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }), rect = shape("rect", { width: 26, height: 10 });
  rect.style.fill = `var(--${colour})`;
  svg.append(rect);
  entry.append(svg, text);
  at(id).append(entry);
}

// --- what is said

function summary() {
  const extremes = (values, name, text) => {
    const order = range(values.length).sort((a, b) => values[b] - values[a]), one = (i) => `${name}${i} ${text(values[i])}`;
    return `${one(order[0])} … ${one(order.at(-1))}`;
  };
  const lines = [
    ["goodput: within both SLOs, of all", "goodput", fixed(4)], ["requests", "offered", whole], ["good", "good", whole],
    ["rejected at arrival", "rejected_at_arrival", whole], ["rejected at decode", "rejected_at_decode", whole],
    ["TTFT violated", "violated_ttft", whole], ["TBT violated", "violated_tbt", whole],
    ["prefill in vain (rejected at decode), s", "wasted_prefill_s", whole],
    ["TTFT median, s", "ttft_p50_s", fixed(2)], ["TTFT p90, s", "ttft_p90_s", fixed(2)], ["TBT p90, s", "tbt_p90_s", fixed(3)],
    ["prompt tokens reused", "hit_rate", percent], ["· on the device", "hit_rate_device", percent], ["· from host memory", "hit_rate_host", percent], ["· fetched", "hit_rate_fetched", percent],
  ];
  const columns = [["", (l) => l[0], ""], ...policies.map((policy) => [policy.name, (l) => l[3] ? l[3](policy.score) : l[2](policy.score[l[1]])])];
  if (policies.length === 2) columns.push(["difference", (l) => {
    const [a, b] = policies.map((p) => p.score[l[1]]);
    return l[3] || !known(a) || !known(b) || a === b ? "" : `${a - b < 0 ? "−" : "+"}${l[2](Math.abs(a - b))}`;
  }]);
  lines.push(["busiest and least busy prefill", "", null, (s) => extremes(s.prefill_busy, "p", percent)]);
  lines.push(["largest and smallest mean batch", "", null, (s) => extremes(s.decode_batch, "d", fixed(1))]);
  fill("summary", `Requests ${R.number[base]} to ${R.number[count - 1]}`, columns, lines);
}

const decision = (o, i) => o.prefill[i] < 0 ? "rejected" : `p${o.prefill[i]} → d${o.decode[i]}${["", ", fetch", ", recompute"][o.source[i]]}`;
function opener(i) {
  const button = element("button", String(R.number[i]), { type: "button", "aria-label": `request ${R.number[i]}` });
  button.addEventListener("click", () => { choose(i); at("request-title").scrollIntoView({ block: "start" }); at("request-title").focus({ preventScroll: true }); });
  return button;
}
const ABOUT = [["request", opener, ""], ["at, s", (i) => R.arrival_s[i].toFixed(1)], ["prompt", (i) => whole(R.input_tokens[i])], ["output", (i) => whole(R.output_tokens[i])]];

function parted() {
  at("parted-section").hidden = policies.length < 2;
  if (policies.length < 2) return;
  const [a, b] = policies.map((p) => p.outcomes), differ = range(count).filter((i) => i >= base && ["prefill", "decode", "source"].some((f) => a[f][i] !== b[f][i]));
  const admission = differ.filter((i) => a.prefill[i] < 0 || b.prefill[i] < 0), first = differ.slice(0, FIRST);
  const costly = differ.filter((i) => policies[0].end[i] !== policies[1].end[i] && !first.includes(i)).slice(0, 2 * FIRST);
  at("parted-about").textContent = differ.length
    ? `${times(differ.length, "decision")} of ${whole(count - base)} differ, ${whole(admission.length)} of them in whether to reject at arrival; the first is on request ${R.number[differ[0]]} at ${R.arrival_s[differ[0]].toFixed(1)} s. From then on the two clusters are not in the same state.`
    : "They decided the same for every request.";
  fill("parted", "The first decisions that differ, then the first after which the request ended differently", [
    ...ABOUT, ...policies.map((p) => [p.name, (i) => decision(p.outcomes, i), ""]),
    ...policies.map((p) => [`became with ${p.name}`, (i) => ENDS[p.end[i]][0], ""]),
  ], [...first, ...costly]);
}

// Requests that a policy lost: with two of them, that the other one served.
function losses() {
  const found = [];
  policies.forEach((policy, k) => {
    const other = policies[1 - k], o = policy.outcomes;
    for (let i = base; i < count; i++) {
      if (policy.end[i] === GOOD || (other && other.end[i] !== GOOD)) continue;
      const missed = policy.end[i] > 2 ? Math.max(o.ttft_s[i] / E.ttft_slo_s, o.tbt_s[i] / E.tbt_slo_s) - 1 : null;
      found.push({ i, k, how: o.reason[i] ? `${ENDS[policy.end[i]][0]}: ${E.reasons[o.reason[i]]}` : ENDS[policy.end[i]][0], vain: o.prefill_s[i] ?? 0, missed, tokens: R.input_tokens[i], at: R.arrival_s[i] });
    }
  });
  return found;
}

function lost() {
  const all = losses(), two = policies.length === 2, hows = [...new Set(all.map((l) => l.how))];
  const mine = (k, how) => all.filter((l) => l.k === k && (how === undefined || l.how === how));
  at("lost-title").textContent = two ? "Requests that only one of them served within both SLOs" : "Requests that were not served within both SLOs";
  at("lost-about").textContent = two
    ? `${policies[0].name} served ${times(mine(1).length, "request")} that ${policies[1].name} lost, and lost ${whole(mine(0).length)} that it served.`
    : `${times(all.length, "request")} of ${whole(count - base)}.`;
  const most = (how) => mine(0, how).length + mine(1, how).length;
  fill("how", "How they were lost, and the prefill that was in vain", [
    ["how", (h) => h, "text"],
    ...policies.flatMap((p, k) => [[`lost by ${p.name}`, (h) => whole(mine(k, h).length)], ["prefill in vain, s", (h) => whole(mine(k, h).reduce((sum, l) => sum + l.vain, 0))]]),
  ], hows.sort((a, b) => most(b) - most(a)));
  const which = at("who");
  which.parentElement.hidden = !two;
  which.append(element("option", "either", { value: "" }), ...policies.map((p, k) => element("option", p.name, { value: k })));
  const list = () => {
    const order = at("order").value, some = all.filter((l) => which.value === "" || l.k === Number(which.value));
    const cost = (l) => order === "at" ? -l.at : l[order] ?? -1;
    some.sort((x, y) => cost(y) - cost(x) || y.tokens - x.tokens);
    fill("lost", `${some.length > LISTED ? `The first ${LISTED} of ` : ""}${times(some.length, "request")}`, [
      ...ABOUT.map(([name, of, kind]) => [name, (l) => of(l.i), kind]),
      ...(two ? [["lost by", (l) => policies[l.k].name, ""]] : []), ["how", (l) => l.how, "text"],
      ["prefill in vain, s", (l) => l.vain.toFixed(2)], ["missed by", (l) => percent(l.missed)],
      ...policies.map((p) => [`decided by ${p.name}`, (l) => decision(p.outcomes, l.i), ""]),
    ], some.slice(0, LISTED));
  };
  which.addEventListener("change", list);
  at("order").addEventListener("change", list);
  list();
}

// What a policy knew, chose and got for a request, in words.
function story(policy, i) {
  const o = policy.outcomes, said = [];
  const queue = (p) => `${(seen(policy, "queue_ms", p, i) / 1e3).toFixed(1)} s`, cached = (p) => seen(policy, "local_blocks", p, i);
  const ttft = (p) => Math.min(seen(policy, "ttft_local_ms", p, i), seen(policy, "ttft_fetch_ms", p, i)) / 1e3;
  const tbt = (d) => seen(policy, "tbt_assigned", d, i) / 1e4;
  const least = (size, of) => range(size).reduce((a, b) => of(b) < of(a) ? b : a);
  const fastest = least(prefills, ttft), fullest = least(prefills, (p) => -cached(p)), calmest = least(decodes, tbt), p = o.prefill[i], d = o.decode[i];
  const there = (q) => `p${q} had ${whole(cached(q))} blocks cached, queue ${queue(q)}, predicted TTFT ${seconds(ttft(q))}`;
  if (p < 0) {
    said.push(`Rejected at arrival: ${E.reasons[o.reason[i]]}.`);
    said.push(`Of the prefills ${there(fastest)}, the least (SLO ${seconds(E.ttft_slo_s)}); of the decodes d${calmest} had the least predicted TBT, ${seconds(tbt(calmest))} (SLO ${seconds(E.tbt_slo_s)}), with ${whole(seen(policy, "batch", calmest, i))} in its batch and ${whole(seen(policy, "pending_requests", calmest, i))} on their way.`);
    return said;
  }
  const fetched = o.source[i] === FETCH ? `, ${whole(o.fetched_blocks[i])} more fetched from p${o.holder[i]}` : o.source[i] === 2 ? ", all of it computed again" : "";
  said.push(`Sent to p${p} with ${whole(cached(p))} of ${whole(blocksOf(i))} blocks cached${fetched}, queue ${queue(p)}, predicted TTFT ${seconds(o.predicted_ttft_s[i])}.`);
  const others = [];
  if (cached(fullest) > cached(p)) others.push(`${there(fullest)}: the most cached`);
  if (fastest !== p && ttft(fastest) < o.predicted_ttft_s[i] - 5e-4 && !(others.length && fastest === fullest)) others.push(`${there(fastest)}: the shortest`);
  if (others.length) said.push(`${others.join("; ")}.`);
  said.push(`To decode on d${d}: ${whole(seen(policy, "batch", d, i))} in its batch and ${whole(seen(policy, "pending_requests", d, i))} on their way, predicted TBT ${seconds(o.predicted_tbt_s[i])}${calmest !== d && tbt(calmest) < tbt(d) ? `; d${calmest} had ${seconds(tbt(calmest))}` : ""}.`);
  if (o.prefill_end_s[i] !== null) said.push(`It waited ${seconds(o.prefill_start_s[i] - R.arrival_s[i])} and was prefilled in ${seconds(o.prefill_end_s[i] - o.prefill_start_s[i])} with ${whole(o.reused_tokens[i])} of ${whole(R.input_tokens[i])} tokens reused: TTFT ${seconds(o.prefill_end_s[i] - R.arrival_s[i])}.`);
  if (o.status[i] === REJECTED_AT_DECODE) said.push(`Rejected at decode: ${E.reasons[o.reason[i]]}; ${seconds(o.prefill_s[i])} of prefill were in vain.`);
  else if (o.join_s[i] !== null) said.push(`Its KV was on d${d} ${seconds(Math.max(0, o.kv_ready_s[i] - o.prefill_end_s[i]))} after that, it joined the batch ${seconds(Math.max(0, o.join_s[i] - o.kv_ready_s[i]))} later and was done in ${seconds(o.finish_s[i] - o.join_s[i])}: TBT ${seconds(o.tbt_s[i])}.`);
  return said;
}

function known_then(policy, i) {
  const o = policy.outcomes, s = (name, j) => seen(policy, name, j, i), ms = (name) => (j) => seconds(s(name, j) / 1e3), tenths = (name) => (j) => seconds(s(name, j) / 1e4);
  const number = (name) => (j) => whole(s(name, j));
  const grid = (caption, letter, size, mine, columns) => {
    const table = element("table"), head = element("thead"), line = element("tr"), body = element("tbody"), box = element("div", "", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${caption}, ${policy.name}` });
    for (const [heading] of [[""], ...columns]) line.append(element("th", heading, { scope: "col", class: heading ? "number" : "" }));
    head.append(line);
    for (const j of range(size)) {
      const row = element("tr", "", j === mine ? { class: "chosen" } : {});
      row.append(element("th", j === mine ? `▸ ${letter}${j}` : `${letter}${j}`, { scope: "row" }), ...columns.map(([, of]) => element("td", of(j), { class: "number" })));
      body.append(row);
    }
    table.append(element("caption", caption, { class: "legend" }), head, body);
    box.append(table);
    return box;
  };
  return [
    grid("Prefill instances at the decision", "p", prefills, o.prefill[i], [["queue", ms("queue_ms")], ["requests", number("queue_requests")], ["blocks cached", number("local_blocks")], ["on device", number("device_blocks")], ["a fetch adds", number("fetch_blocks")], ["TTFT", ms("ttft_local_ms")], ["with a fetch", ms("ttft_fetch_ms")]]),
    grid("Decode instances at the decision", "d", decodes, o.decode[i], [["batch", number("batch")], ["on their way", number("pending_requests")], ["KV tokens", number("kv_tokens")], ["room", (j) => whole(E.kv_capacity_tokens[j])], ["TBT now", tenths("tbt_now")], ["with all assigned", tenths("tbt_assigned")], ["forecast", tenths("tbt_at_join")]]),
  ];
}

function choose(i) {
  chosen = i;
  at("request-title").textContent = `Request ${R.number[i]}`;
  at("number").value = R.number[i];
  at("before").disabled = i <= base;
  at("after").disabled = i >= count - 1;
  at("request-about").textContent = `It arrived at ${R.arrival_s[i].toFixed(2)} s with ${whole(R.input_tokens[i])} tokens (${times(blocksOf(i), "block")}), and has ${whole(R.output_tokens[i])} tokens to put out.`;
  at("stories").replaceChildren(...policies.map((policy) => {
    const box = element("div"), end = policy.end[i];
    const slo = end === 3 ? ` (${seconds(policy.outcomes.ttft_s[i])}, SLO ${seconds(E.ttft_slo_s)})` : end === 4 ? ` (${seconds(policy.outcomes.tbt_s[i])}, SLO ${seconds(E.tbt_slo_s)})` : "";
    box.append(element("h3", policy.name), element("p", `${ENDS[end][0]}${slo}`, { class: `verdict ${end === GOOD ? "good" : "bad"}` }));
    if (i < base) box.append(element("p", "It came before the part shown, and is still in the cluster; what was known of it is not kept."));
    else box.append(...story(policy, i).map((text) => element("p", text)), ...known_then(policy, i));
    return box;
  }));
  history.replaceState(null, "", `#request=${R.number[i]}`);
  redraw();
}
const numbered = (number) => R.number.indexOf(number);

function request() {
  at("number").min = R.number[0];
  at("number").max = R.number[count - 1];
  at("number").addEventListener("change", () => { const i = numbered(Number(at("number").value)); choose(i < 0 ? chosen : i); });
  at("before").addEventListener("click", () => choose(chosen - 1));
  at("after").addEventListener("click", () => choose(chosen + 1));
  at("near").addEventListener("click", () => {
    const until = Math.max(...policies.map((p) => leftAt(p.outcomes, chosen)));
    look(R.arrival_s[chosen] - 2, until + 2);
    at("timeline-title").scrollIntoView({ block: "start" });
  });
  const asked = () => /^#request=(-?\d+)$/.test(location.hash) ? numbered(Number(location.hash.slice("#request=".length))) : -1;
  addEventListener("hashchange", () => { if (asked() >= 0) choose(asked()); });
  const first = losses().sort((a, b) => b.vain - a.vain)[0];
  choose(asked() >= 0 ? asked() : first ? first.i : base);
}

function about() {
  at("about").textContent = `${E.description}; seed ${E.seed}; ${whole(count - base)} of ${whole(E.part_requests)} requests, code ${E.code_version}`;
  if (policies.length === 2) {
    const [a, b] = [...policies].sort((x, y) => y.score.goodput - x.score.goodput);
    at("verdict").textContent = a.score.goodput === b.score.goodput ? "Both have the same goodput in this episode." : `In this episode ${a.name} has ${(a.score.goodput - b.score.goodput).toFixed(4)} more goodput than ${b.name}. One episode proves nothing; the leaderboard has intervals.`;
  }
  const notes = [
    "The policies decided the same requests, each on a cluster of its own. What is drawn is the simulator's own record (docs/physics.md).",
    `Numbers count requests from the start of what was simulated; those before ${E.first} are not counted. After the last request shown no more arrive.`,
    "Predictions are those of the observation that the policy decided on; TBT with all assigned counts requests that are on their way to the decode instance.",
    "KV room taken in decode is the context and the output still to come of every request in the batch, as the instance reserves it. Batch and KV are drawn from a request's join to its finish.",
    "Prefill in vain: seconds of prefill for a request that was then rejected at decode or missed an SLO; in the summary, rejected at decode only.",
    `Trace ${E.trace_checksum}, cluster ${E.spec_checksum}.`,
  ];
  at("notes").append(...notes.map((text) => element("li", text)));
  at("command").textContent = E.command;
  document.title = `Replay: ${policies.map((p) => p.name).join(" and ")}`;
}

read().then((episode) => {
  E = episode;
  R = E.requests;
  policies = E.policies;
  count = R.number.length;
  base = R.number.findIndex((number) => number >= E.first);
  prefills = policies[0].score.prefill_busy.length;
  decodes = policies[0].score.decode_batch.length;
  policies.forEach(prepare);
  about();
  summary();
  timeline();
  parted();
  lost();
  request();
  requestAnimationFrame(() => { document.body.dataset.ready = Math.round(performance.now()); }); // milliseconds, drawn and all
});
