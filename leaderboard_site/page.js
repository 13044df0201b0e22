// Draws RESULT (result.js). What the filters show is averaged here, by the rule of leaderboard.py.

const DRAWN = 6; // policies that the charts draw at first
const COLOURS = 8, DASHES = ["", "6 3", "2 2", "8 2 2 2"];
const LOST = [["rejected_at_arrival", "rejected at arrival"], ["rejected_at_decode", "rejected at decode"], ["violated_ttft", "TTFT violated"], ["violated_tbt", "TBT violated"]];
const TIERS = [["hit_rate_device", "device"], ["hit_rate_host", "host"], ["hit_rate_fetched", "fetched from another instance"]];
const cells = RESULT.cells, policies = RESULT.policies;
const cellOf = new Map(cells.map((cell) => [cell.cell, cell]));
const policyOf = new Map(policies.map((policy, i) => [policy.policy, { ...policy, number: i }]));
const rowOf = new Map(RESULT.rows.map((row) => [`${row.policy}\n${row.cell}`, row]));
const row = (policy, cell) => rowOf.get(`${policy}\n${cell.cell}`);
const traceOf = (cell) => `${cell.trace} (${cell.part})`;
const loadOf = (cell) => cell.times_capacity === null ? `load ${short(cell.load)}` : `${short(cell.times_capacity)} × capacity`;
const saturated = (cell) => cell.times_capacity !== null && cell.times_capacity >= 1;
const FILTERS = [["by-trace", traceOf], ["by-cluster", (cell) => cell.cluster], ["by-load", loadOf]];
const bounded = cells.every((cell) => cell.bound !== undefined);
const clairvoyant = policies.find((policy) => !policy.competes)?.policy;
let drawn = new Set();

const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(4)}`;
const mean = (values) => values.length && values.every(known) ? values.reduce((a, b) => a + b, 0) / values.length : null;
const span = (low, high) => `${low.toFixed(3)}–${high.toFixed(3)}`;

// Mean goodput over cells. Errors of cells of one trace are averaged, of different traces added as squares (leaderboard.py, _over_cells).
function goodputOver(policy, among) {
  if (!among.length) return null;
  const rows = among.map((cell) => row(policy, cell));
  const middle = mean(rows.map((r) => r.goodput));
  const half = (side) => {
    const errors = {};
    rows.forEach((r, i) => {
      const trace = among[i].trace_checksum;
      errors[trace] = (errors[trace] || 0) + Math.abs(r[side] - r.goodput) / rows.length;
    });
    return Math.hypot(...Object.values(errors));
  };
  return { mean: middle, low: Math.max(0, middle - half("goodput_low")), high: Math.min(1, middle + half("goodput_high")) };
}

const shownCells = () => cells.filter((cell) => FILTERS.every(([id, of]) => [...at(id).querySelectorAll("input")].some((box) => box.checked && box.value === of(cell))));
const link = (kind, name, text = name) => element("a", text, { href: `#${kind}=${encodeURIComponent(name)}` });

// --- tables

function ranked(among) {
  return policies
    .map(({ policy, competes }) => ({ policy, competes, all: goodputOver(policy, among), past: goodputOver(policy, among.filter(saturated)), rows: among.map((cell) => row(policy, cell)) }))
    .sort((a, b) => b.all.mean - a.all.mean);
}

function ranking(among) {
  if (!among.length) return at("ranking").replaceChildren(element("caption", "No cell is shown."));
  const order = ranked(among), low = Math.min(...order.map((r) => r.all.low)), high = Math.max(...order.map((r) => r.all.high));
  let place = 0;
  for (const entry of order) entry.place = entry.competes ? ++place : "–";
  const columns = [
    ["place", (r) => String(r.place)],
    ["policy", (r) => { const box = element("span"); box.append(link("policy", r.policy), r.competes ? "" : " (no scheduler: it knows the future)"); return box; }, ""],
    ["drawn", (r) => box(r.policy), ""],
    ["goodput", (r) => r.all.mean.toFixed(4)],
    ["95 % interval", (r) => span(r.all.low, r.all.high)],
    [`${low.toFixed(2)} to ${high.toFixed(2)}`, (r) => whisker(r, low, high), ""],
  ];
  if (among.some(saturated)) columns.push(["at or past capacity", (r) => r.past.mean.toFixed(4)], ["95 % interval", (r) => span(r.past.low, r.past.high)]);
  if (bounded) columns.push(["headroom to the bound", (r) => (mean(among.map((cell) => cell.bound)) - r.all.mean).toFixed(4)]);
  if (clairvoyant) columns.push(["to the clairvoyant", (r) => signed(goodputOver(clairvoyant, among).mean - r.all.mean)]);
  columns.push(["TTFT p90 s", (r) => fixed(2)(mean(r.rows.map((x) => x.ttft_p90_s)))], ["TBT p90 s", (r) => fixed(3)(mean(r.rows.map((x) => x.tbt_p90_s)))]);
  columns.push(["hit rate", (r) => fixed(3)(mean(r.rows.map((x) => x.hit_rate)))], ["decision µs", (r) => fixed(1)(mean(r.rows.map((x) => x.decision_us)))]);
  fill("ranking", `Means over ${among.length} of ${cells.length} cells`, columns, order, 2);
}

function box(policy) {
  const made = element("label"), input = element("input", "", { type: "checkbox", "aria-label": `draw ${policy}` });
  input.checked = drawn.has(policy);
  input.addEventListener("change", () => {
    drawn[input.checked ? "add" : "delete"](policy);
    charts(shownCells());
    cellCharts(chosenCell());
  });
  made.append(input, sample(policy));
  return made;
}

function whisker({ policy, all }, low, high) {
  const x = scale(4, 116, low, high), y = 8;
  const svg = shape("svg", { class: "whisker", viewBox: "0 0 120 16", role: "img", "aria-label": `${policy}: ${all.mean.toFixed(4)}, ${span(all.low, all.high)}` });
  svg.append(shape("path", { class: `line p${colour(policy)}`, d: `M${x(all.low)} ${y}H${x(all.high)}` }), shape("circle", { class: `p${colour(policy)}`, cx: x(all.mean), cy: y, r: 3 }));
  return svg;
}

const BOUND = ["at most", (r) => fixed(4)(r.bound)];
const FIGURES = [
  ["goodput", (r) => r.goodput.toFixed(4)],
  ["95 % interval", (r) => span(r.goodput_low, r.goodput_high)],
  ...LOST.map(([key, name]) => [name, (r) => whole(r[key])]),
  ["wasted prefill s", (r) => whole(r.wasted_prefill_s)],
  ["TTFT mean s", (r) => fixed(2)(r.ttft_mean_s)], ["TTFT p90 s", (r) => fixed(2)(r.ttft_p90_s)], ["TBT p90 s", (r) => fixed(3)(r.tbt_p90_s)],
  ["hit rate", (r) => fixed(3)(r.hit_rate)], ...TIERS.map(([key, name]) => [name, (r) => fixed(3)(r[key])]),
  ["decision µs", (r) => fixed(1)(r.decision_us)], ["alone µs", (r) => fixed(1)(r.decision_alone_us)],
];

function cellTable(among) {
  const best = (cell) => policies.filter((p) => p.competes).map((p) => row(p.policy, cell)).reduce((a, b) => b.goodput > a.goodput ? b : a);
  const columns = [
    ["cell", (cell) => link("cell", cell.cell), ""],
    ["trace", traceOf, ""], ["cluster", (cell) => cell.cluster, ""], ["load", loadOf],
    ["requests", (cell) => whole(cell.offered)],
    ["best", (cell) => link("policy", best(cell).policy), "text"],
    ["goodput", (cell) => best(cell).goodput.toFixed(4)],
    ["minus the second", (cell) => cell.paired ? `${signed(cell.paired.mean)} [${signed(cell.paired.low)}, ${signed(cell.paired.high)}]` : "–"],
    ["winner", (cell) => cell.winner ? "yes" : "none: not separated", ""],
  ];
  if (bounded) columns.splice(7, 0, BOUND);
  fill("cells", `${among.length} of ${cells.length} cells`, columns, among);
}

// --- charts

const colour = (policy) => policyOf.get(policy).number % COLOURS;
const dash = (policy) => DASHES[Math.floor(policyOf.get(policy).number / COLOURS) % DASHES.length];
function sample(policy) {
  const svg = shape("svg", { viewBox: "0 0 26 10", width: 26, height: 10, "aria-hidden": "true" });
  svg.append(shape("path", { class: `line p${colour(policy)}`, "stroke-dasharray": dash(policy), d: "M0 5H26" }));
  return svg;
}
function key(names) {
  const made = element("figcaption");
  for (const name of names) {
    const entry = element("span", "", { class: "key" });
    entry.append(sample(name), name);
    made.append(entry);
  }
  return made;
}
const drawnPolicies = () => policies.map((p) => p.policy).filter((name) => drawn.has(name));

function charts(among) {
  const families = new Map(among.map((cell) => [cell.setting, []])), made = [];
  for (const cell of among) families.get(cell.setting).push(cell);
  for (const [setting, family] of families) {
    if (new Set(family.map((cell) => cell.load)).size > 1) made.push(curve(setting, [...family].sort((a, b) => a.load - b.load)));
  }
  at("curves-section").hidden = !made.length;
  at("curves").replaceChildren(...made);
}

function curve(setting, family) {
  const names = drawnPolicies();
  const x = scale(LEFT, W - RIGHT, family[0].load, family.at(-1).load), y = scale(H - BOTTOM, TOP, 0, 1);
  const said = names.map((name) => `${name}: ${family.map((cell) => row(name, cell).goodput.toFixed(3)).join(", ")}`);
  const label = `Goodput on ${setting} at ${family.map(loadOf).join(", ")}. ${said.join("; ")}`;
  const svg = frame(label, family.map((cell) => [cell.load, short(cell.times_capacity ?? cell.load)]), [[0, "0"], [0.5, "0.5"], [0.9, "0.9"], [1, "1"]], x, y);
  svg.append(shape("path", { class: "axis", "stroke-dasharray": "3 3", d: `M${LEFT} ${y(0.9)}H${W - RIGHT}` }));
  if (bounded) svg.append(shape("path", { class: "slo", d: `M${family.map((cell) => `${x(cell.load)} ${y(cell.bound)}`).join("L")}` }));
  for (const name of names) {
    const rows = family.map((cell) => row(name, cell));
    const points = (side) => rows.map((r, i) => `${x(family[i].load)} ${y(r[side])}`);
    svg.append(shape("path", { class: `band p${colour(name)}`, d: `M${[...points("goodput_low"), ...points("goodput_high").reverse()].join("L")}Z` }));
    svg.append(shape("path", { class: `line p${colour(name)}`, "stroke-dasharray": dash(name), d: `M${points("goodput").join("L")}` }));
  }
  const figure = element("figure"), box = element("div");
  const unit = family[0].times_capacity === null ? "times the trace's speed" : "times capacity";
  figure.append(svg, key(names), element("figcaption", `Load, ${unit}; bands: 95 %.${bounded ? " Red: no policy has more." : ""}`));
  box.append(element("h3", setting), figure);
  return box;
}

const logarithmic = (from, to, low, high) => { const of = scale(from, to, Math.log(low), Math.log(high)); return (v) => of(Math.log(Math.min(high, Math.max(low, v)))); };
function ticks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const digit of high / low < 30 ? [1, 2, 5] : [1]) {
      const value = digit * 10 ** power;
      if (value >= low && value <= high) found.push([value, short(value)]);
    }
  return found;
}

function distribution(id, what, field, cell, slo) {
  const names = drawnPolicies().filter((name) => row(name, cell)[field].length);
  const values = names.flatMap((name) => row(name, cell)[field]).filter((v) => v > 0);
  if (!values.length) return at(id).replaceChildren(element("figcaption", "nothing to draw: no policy is chosen, or none of them completed a request"));
  const low = Math.min(slo, ...values), high = Math.max(slo, ...values);
  const x = logarithmic(LEFT, W - RIGHT, low, high), y = scale(H - BOTTOM, TOP, 0, 1);
  const said = names.map((name) => { const q = row(name, cell)[field]; return `${name}: median ${short(q[Math.round((q.length - 1) / 2)])} s`; });
  const svg = frame(`${what} in ${cell.cell}, share of completed requests. ${said.join("; ")}`, ticks(low, high), [[0, "0"], [0.5, "0.5"], [1, "1"]], x, y);
  svg.append(shape("path", { class: "slo", d: `M${x(slo)} ${TOP}V${H - BOTTOM}` }));
  for (const name of names) {
    const quantiles = row(name, cell)[field];
    svg.append(shape("path", { class: `line p${colour(name)}`, "stroke-dasharray": dash(name), d: `M${quantiles.map((v, i) => `${x(v)} ${y(i / (quantiles.length - 1))}`).join("L")}` }));
  }
  at(id).replaceChildren(svg, key(names), element("figcaption", `Seconds, logarithmic; share of completed requests at most that. Red: the SLO, ${short(slo)} s.`));
}

// Shares of a whole, stacked: entries are [name, row, of what].
function stacked(id, what, parts, entries) {
  const step = 22, shares = entries.map(([, r, whole]) => parts.map(([field]) => (r[field] ?? 0) / whole));
  const most = Math.max(1e-9, ...shares.map((list) => list.reduce((a, b) => a + b, 0)));
  const said = entries.map(([name], i) => `${name}: ${parts.map(([, part], j) => `${part} ${percent(shares[i][j])}`).join(", ")}`);
  const svg = shape("svg", { viewBox: `0 0 ${W} ${step * entries.length + 4}`, role: "img", "aria-label": `${what}. ${said.join("; ")}` });
  entries.forEach(([name], i) => {
    const text = shape("text", { x: 148, y: step * i + 15, "text-anchor": "end" }, name.length > 22 ? `${name.slice(0, 10)}…${name.slice(-11)}` : name);
    const all = shares[i].reduce((a, b) => a + b, 0);
    svg.append(text);
    let x = 154;
    shares[i].forEach((share, j) => {
      const width = Number((220 * share / most).toFixed(1));
      if (width) {
        const bar = shape("rect", { class: `s${j}`, x, y: step * i + 4, width, height: step - 8 });
        bar.append(shape("title", {}, `${name}: ${parts[j][1]} ${percent(share)}`));
        svg.append(bar);
      }
      x += width;
    });
    svg.append(shape("text", { x: x + 4, y: step * i + 15 }, percent(all)));
  });
  const caption = element("figcaption");
  parts.forEach(([, part], j) => {
    const entry = element("span", "", { class: "key" }), swatch = shape("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" });
    swatch.append(shape("rect", { class: `s${j}`, width: 26, height: 10 }));
    entry.append(swatch, part);
    caption.append(entry);
  });
  at(id).replaceChildren(svg, caption);
}

// --- panels, each with an address of its own

function asked(kind) {
  if (!location.hash.startsWith(`#${kind}=`)) return null;
  const value = location.hash.slice(kind.length + 2);
  try { return decodeURIComponent(value); } catch { return value; }
}
let lastCell = cells[0];
function chosenCell() {
  const found = cellOf.get(asked("cell"));
  if (found) lastCell = found;
  return lastCell;
}

function cellCharts(cell) {
  distribution("cell-ttft", "TTFT", "ttft_quantiles_s", cell, cell.ttft_slo_s);
  distribution("cell-tbt", "TBT", "tbt_quantiles_s", cell, cell.tbt_slo_s);
}

function cellPanel() {
  const cell = chosenCell(), rows = RESULT.rows.filter((r) => r.cell === cell.cell);
  at("cell-title").textContent = `Cell ${cell.cell}`;
  at("cell-about").textContent = `${cell.description}; ${whole(cell.offered)} requests, ${cell.warmup} before them not counted; seeds ${cell.seeds.join(", ")}; trace ${cell.trace_checksum}, cluster ${cell.spec_checksum}.`;
  const paired = cell.paired ? `${cell.paired.policy} minus ${cell.paired.baseline}: ${signed(cell.paired.mean)} [${signed(cell.paired.low)}, ${signed(cell.paired.high)}]` : "";
  const bound = cell.bound === undefined ? "" : ` No policy has more than ${cell.bound.toFixed(4)}.`;
  at("cell-verdict").textContent = (paired ? `${cell.winner ? `Winner: ${cell.winner}` : "No winner: not separated"} (${paired}).` : "") + bound;
  const columns = [["policy", (r) => link("policy", r.policy), ""], ...FIGURES];
  if (cell.bound !== undefined) columns.splice(3, 0, ["headroom", (r) => (cell.bound - r.goodput).toFixed(4)]);
  fill("cell-rows", "Every policy here, best first; counts are means over seeds", columns, rows);
  cellCharts(cell);
  stacked("cell-lost", `Requests that were not good in ${cell.cell}`, LOST, rows.map((r) => [r.policy, r, cell.offered]));
  stacked("cell-hits", `Prompt tokens reused in ${cell.cell}`, TIERS, rows.map((r) => [r.policy, r, 1]));
}

function policyPanel() {
  const name = asked("policy");
  at("policy").hidden = name === null;
  if (name === null) return;
  const policy = policyOf.get(name), rows = policy ? RESULT.rows.filter((r) => r.policy === name) : [];
  at("policy-title").textContent = `Policy ${name}`;
  at("policy-note").textContent = policy ? policy.competes ? "" : "It knows the future: no scheduler, and no contender." : "No policy of this run is called so.";
  fill("policy-configuration", `${policy ? policy.configuration.length : 0} settings`, [["setting", (f) => f.name, ""], ["value", (f) => f.value, "text"], ["meaning", (f) => f.meaning, "text"]], policy ? policy.configuration : []);
  at("policy-command").textContent = policy ? policy.command : "";
  const columns = [["cell", (r) => link("cell", r.cell), ""], ...FIGURES];
  if (bounded) columns.splice(3, 0, ["headroom", (r) => (cellOf.get(r.cell).bound - r.goodput).toFixed(4)]);
  fill("policy-rows", `${rows.length} cells, code ${RESULT.code_version}`, columns, rows);
  stacked("policy-lost", `Requests of ${name} that were not good`, LOST, rows.map((r) => [r.cell, r, cellOf.get(r.cell).offered]));
  stacked("policy-hits", `Prompt tokens reused by ${name}`, TIERS, rows.map((r) => [r.cell, r, 1]));
}

function panels() {
  cellPanel();
  policyPanel();
  const kind = ["cell", "policy"].find((k) => asked(k) !== null);
  if (kind) { at(`${kind}-title`).focus({ preventScroll: true }); at(`${kind}-title`).scrollIntoView({ block: "start" }); }
}

// --- the whole page

function show() {
  const among = shownCells();
  at("shown").textContent = `${among.length} of ${cells.length} cells are shown.`;
  ranking(among);
  charts(among);
  cellTable(among);
  if (among.length && !among.includes(lastCell) && asked("cell") === null) {
    lastCell = among[0];
    cellPanel();
  }
}

function filters() {
  for (const [id, of] of FILTERS) {
    for (const value of new Set(cells.map(of))) {
      const label = element("label"), input = element("input", "", { type: "checkbox", value });
      input.checked = true;
      label.append(input, ` ${value}`);
      at(id).append(label);
    }
  }
  at("filters").addEventListener("change", show);
  at("filters").addEventListener("submit", (event) => event.preventDefault());
  at("all").addEventListener("click", () => {
    for (const input of at("filters").querySelectorAll("input")) input.checked = true;
    show();
  });
}

function minus(paired) {
  return `${paired.policy} minus the best of the others, ${paired.baseline}: ${signed(paired.mean)} [${signed(paired.low)}, ${signed(paired.high)}]`;
}

function about() {
  at("about").textContent = `${policies.length} policies, ${cells.length} cells, code ${RESULT.code_version}`;
  const said = [];
  if (RESULT.paired) said.push(`Over all cells ${minus(RESULT.paired)}; ${RESULT.winner ? `winner: ${RESULT.winner}` : "no winner: not separated"}.`);
  if (RESULT.paired_saturated) said.push(`At or past capacity ${minus(RESULT.paired_saturated)}.`);
  at("verdict").textContent = said.join(" ");
  at("notes").append(...Object.entries(RESULT.notes).filter(([name]) => name !== "bound" || bounded).map(([, text]) => element("li", text)));
  at("notes").append(...RESULT.capacities.map((c) => element("li", `Capacity of ${c.setting}: load ${short(c.load)}, ${c.meaning}.`)));
  at("command").textContent = RESULT.command;
  at("disqualified-section").hidden = !RESULT.disqualified.length;
  fill("disqualified", "They have no figures.", [["submission", (d) => d.policy, ""], ["reason", (d) => d.reason, "text"]], RESULT.disqualified);
  const seen = [...new Map(cells.map((cell) => [cell.setting, cell])).values()];
  fill("inputs", "Inputs", [["setting", (c) => c.setting, ""], ["trace checksum", (c) => c.trace_checksum, ""], ["cluster", (c) => c.cluster, ""], ["cluster checksum", (c) => c.spec_checksum, ""], ["seeds", (c) => c.seeds.join(", "), ""], ["warmup", (c) => String(c.warmup)], ["TTFT SLO s", (c) => short(c.ttft_slo_s)], ["TBT SLO s", (c) => short(c.tbt_slo_s)]], seen);
}

drawn = new Set(ranked(cells).slice(0, DRAWN).map((r) => r.policy));
about();
filters();
show();
panels();
addEventListener("hashchange", panels);
