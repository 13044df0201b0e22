// The page asks for what is new once a second and draws it.

const KEPT = 500;
const SHOWN = 60; // decisions in the table
const TILES = 40; // workers of a pool above which tiles are small
let after = 0, decisions = [], outcomes = [], asked = false;

const quantile = (values, q) => {
  const known = values.filter((v) => v !== null).sort((a, b) => a - b);
  return known.length ? known[Math.min(known.length - 1, Math.floor(q * known.length))] : null;
};

function show(state) {
  at("cluster").textContent = state.cluster;
  document.title = `Conductor ${state.cluster}`;
  const roles = [`${state.policy} decides`, `${state.fallback} where it fails`];
  if (state.canary) roles.push(`${state.canary} for ${(100 * state.canary_share).toFixed(1)} %`);
  if (state.shadow) roles.push(`${state.shadow} beside it`);
  at("policies").textContent = roles.join(", ");
  const trouble = [];
  if (state.draining) trouble.push("Shutting down: no new requests.");
  if (state.panic) trouble.push(`All workers of the ${state.panic} pool are down; they are used all the same.`);
  say("trouble", trouble.join(" "));
  figures(state);
  pools(state);
  overTime("ttft", "ttft_s", state.slo.ttft_s);
  overTime("tbt", "tbt_s", state.slo.tbt_s);
  predicted();
  bars("rejected", Object.entries(state.rejected).map(([name, n]) => [name.replace("rejected-", ""), n]), whole, "nothing was rejected");
  cache(state);
  at("shadow-section").hidden = !state.shadow;
  at("shadow").textContent = `${state.shadow} would have decided the same ${percent(state.shadow_agreed / state.shadow_asked)} of ${whole(state.shadow_asked)} times.`;
  table();
}

function say(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
  at(id).hidden = !text;
}

function figures(state) {
  const rejected = Object.values(state.rejected).reduce((a, b) => a + b, 0);
  const finished = state.ended.finished || 0;
  const recent = outcomes.slice(-200);
  const rows = [
    ["in flight", whole(state.in_flight)],
    ["assigned", whole(state.assigned)],
    ["rejected", whole(rejected)],
    ["finished", whole(finished)],
    ["failed or expired", whole(Object.values(state.ended).reduce((a, b) => a + b, 0) - finished)],
    ["within both SLOs", percent(state.good / finished)],
    [`TTFT p50 (SLO ${seconds(state.slo.ttft_s)})`, seconds(quantile(recent.map((o) => o.ttft_s), 0.5))],
    ["TTFT p90", seconds(quantile(recent.map((o) => o.ttft_s), 0.9))],
    [`TBT p50 (SLO ${seconds(state.slo.tbt_s)})`, seconds(quantile(recent.map((o) => o.tbt_s), 0.5))],
    ["TBT p90", seconds(quantile(recent.map((o) => o.tbt_s), 0.9))],
    ["decision p50", `${(quantile(decisions.slice(-200).map((d) => d.decision_us), 0.5) ?? 0).toFixed(0)} µs`],
    ["prompt tokens reused", percent(decisions.reduce((a, d) => a + (d.reused_tokens || 0), 0) / decisions.reduce((a, d) => a + (d.reason ? 0 : d.tokens), 0))],
  ];
  const list = at("now");
  if (list.children.length !== rows.length) list.replaceChildren(...rows.map(() => { const row = element("div"); row.append(element("dt"), element("dd")); return row; }));
  rows.forEach(([name, value], i) => {
    list.children[i].children[0].textContent = name;
    list.children[i].children[1].textContent = value;
  });
}

function loadOf(worker, slo) {
  const prefill = worker.queue_s === undefined ? 0 : (worker.queue_s || 0) / slo.ttft_s;
  const decode = worker.tbt_s === undefined ? 0 : (worker.tbt_s || 0) / slo.tbt_s;
  return Math.max(prefill, decode);
}
function about(worker, slo) {
  const parts = [`${worker.id} (${worker.role}): ${worker.up ? "up" : "down"}`];
  if (worker.note) parts.push(worker.note);
  if (worker.queue_s !== undefined) parts.push(`queue ${seconds(worker.queue_s)}, ${whole(worker.pending || 0)} requests`);
  if (worker.device_blocks !== undefined) parts.push(`cache: device ${whole(worker.device_blocks)}, host ${whole(worker.host_blocks)} blocks`);
  if (worker.batch !== undefined && worker.batch !== null) parts.push(`batch ${whole(worker.batch)}, KV ${percent(worker.kv_tokens / worker.kv_capacity)}, TBT ${seconds(worker.tbt_s)}`);
  parts.push(`load ${(100 * loadOf(worker, slo)).toFixed(0)} % of the SLO`);
  if (worker.metrics_age_s !== null && worker.metrics_age_s !== undefined) parts.push(`metrics ${seconds(worker.metrics_age_s)} old`);
  return parts.join("; ");
}

function pools(state) {
  const groups = { prefill: [], decode: [], both: [] };
  for (const worker of state.workers) groups[worker.role].push(worker);
  for (const [role, workers] of Object.entries(groups)) {
    let pool = at(`pool-${role}`);
    if (!workers.length) { if (pool) pool.parentElement.remove(); continue; }
    if (!pool) {
      const box = element("div");
      pool = element("div", "", { id: `pool-${role}`, class: "pool", role: "group", "aria-label": `${role} workers` });
      box.append(element("h3", "", { class: "legend" }), pool);
      at("pools").append(box);
    }
    pool.previousSibling.textContent = `${role}: ${workers.length}`;
    pool.classList.toggle("many", workers.length > TILES);
    while (pool.children.length > workers.length) pool.lastChild.remove();
    workers.forEach((worker, i) => {
      let tile = pool.children[i];
      if (!tile) {
        tile = element("button", "", { type: "button", class: "tile" });
        tile.append(element("span"), element("small"), element("i"));
        tile.addEventListener("click", () => say("worker", tile.getAttribute("aria-label")));
        pool.append(tile);
      }
      const load = loadOf(worker, state.slo);
      tile.className = `tile ${worker.up ? load >= 1 ? "over" : load >= 0.5 ? "busy" : "calm" : "down"}`;
      tile.children[0].textContent = worker.id;
      tile.children[1].textContent = worker.role === "decode" ? `batch ${whole(worker.batch || 0)}` : `queue ${seconds(worker.queue_s)}`;
      tile.children[2].style.width = `${Math.min(100, 100 * load)}%`;
      const text = about(worker, state.slo);
      if (tile.title !== text) { tile.title = text; tile.setAttribute("aria-label", text); }
    });
  }
}

function put(id, svg, empty) {
  at(id).replaceChildren(svg || element("figcaption", empty));
}
function overTime(id, field, slo) {
  const points = outcomes.filter((o) => o[field] !== null);
  if (!points.length) return put(id, null, "no request has ended yet");
  const now = points[points.length - 1].at_s, first = points[0].at_s;
  const top = Math.max(slo * 1.15, quantile(points.map((p) => p[field]), 0.99));
  const x = scale(LEFT, W - RIGHT, first, now), y = scale(H - BOTTOM, TOP, 0, top);
  const over = points.filter((p) => p[field] > slo).length;
  const label = `${id.toUpperCase()} of the last ${points.length} requests: median ${seconds(quantile(points.map((p) => p[field]), 0.5))}, ${over} above the SLO of ${seconds(slo)}`;
  const svg = frame(label, [[first, `${Math.round(now - first)} s ago`], [now, "now"]].map(([v, t], i) => [i ? v - (now - first) * 0.03 : v + (now - first) * 0.08, t]), [[0, "0"], [slo, seconds(slo)], [top, ""]], x, y);
  svg.append(shape("path", { class: "slo", d: `M${LEFT} ${y(slo)}H${W - RIGHT}` }));
  for (const p of points) svg.append(shape("circle", { class: p[field] > slo ? "point bad" : "point", r: 2.2, cx: x(p.at_s), cy: y(Math.min(top, p[field])) }));
  put(id, svg);
}

function predicted() {
  const points = outcomes.filter((o) => o.ttft_s !== null && o.predicted_ttft_s !== null && o.ttft_s > 0 && o.predicted_ttft_s > 0);
  if (!points.length) return put("predicted", null, "no request has ended yet");
  const all = points.flatMap((p) => [p.ttft_s, p.predicted_ttft_s]);
  const low = Math.log10(Math.min(...all)), high = Math.log10(Math.max(...all));
  const x = scale(LEFT, W - RIGHT, low, high), y = scale(H - BOTTOM, TOP, low, high);
  const error = quantile(points.map((p) => Math.abs(p.predicted_ttft_s / p.ttft_s - 1)), 0.5);
  const ticks = [low, (low + high) / 2, high].map((v) => [v, seconds(10 ** v)]);
  const svg = frame(`Predicted against actual TTFT, both logarithmic: half of the predictions are within ${(100 * error).toFixed(0)} %`, ticks.slice(1, 2), ticks, x, y);
  svg.append(shape("path", { class: "axis", d: `M${x(low)} ${y(low)}L${x(high)} ${y(high)}` }));
  for (const p of points) svg.append(shape("circle", { class: p.good ? "point" : "point bad", r: 2.2, cx: x(Math.log10(p.ttft_s)), cy: y(Math.log10(p.predicted_ttft_s)) }));
  svg.append(shape("text", { x: W - RIGHT, y: H - BOTTOM - 6, "text-anchor": "end" }, `actual; median error ${(100 * error).toFixed(0)} %`));
  put("predicted", svg);
}

function bars(id, rows, text, empty) {
  if (!rows.length) return put(id, null, empty);
  const most = Math.max(...rows.map(([, n]) => n), 1e-9), step = 26, height = step * rows.length + 6;
  const svg = shape("svg", { viewBox: `0 0 ${W} ${height}`, role: "img", "aria-label": rows.map(([name, n]) => `${name}: ${text(n)}`).join(", ") });
  rows.forEach(([name, n], i) => {
    svg.append(shape("text", { x: 110, y: step * i + 18, "text-anchor": "end" }, name));
    svg.append(shape("rect", { class: "bar", x: 116, y: step * i + 6, height: step - 9, width: Math.max(1, 220 * n / most) }));
    svg.append(shape("text", { x: 122 + 220 * n / most, y: step * i + 18 }, text(n)));
  });
  put(id, svg);
}

function cache(state) {
  const sums = {};
  for (const worker of state.workers) for (const tier of ["device", "host"]) {
    if (worker[`${tier}_blocks`] === undefined) continue;
    sums[tier] ??= [0, 0];
    sums[tier][0] += worker[`${tier}_blocks`];
    sums[tier][1] += worker[`${tier}_capacity`];
  }
  sums.index = [state.index.blocks, state.index.capacity];
  const rows = Object.entries(sums).map(([tier, [used, size]]) => [tier, size ? used / size : 0, used]);
  bars("cache", rows.map(([tier, share, used]) => [`${tier} (${whole(used)})`, share]), percent, "");
}

function table() {
  const rows = decisions.slice(-SHOWN).reverse().map((d) => {
    const row = element("tr");
    const where = d.reason ? d.reason : `${d.prefill} → ${d.decode}`;
    const cells = [`${d.at_s.toFixed(1)} s`, d.id.length > 24 ? `…${d.id.slice(-22)}` : d.id, whole(d.tokens), where, d.reason ? "–" : `${whole(d.reused_tokens)} ${d.reused_tokens ? d.source : ""}`, seconds(d.ttft_s), seconds(d.tbt_s), `${d.decision_us.toFixed(0)} µs`];
    cells.forEach((text, i) => row.append(element("td", text, i === 3 && d.reason ? { class: "bad" } : {})));
    const cell = element("td"), button = element("button", "why", { type: "button", "aria-label": `why ${d.id}`, "data-id": d.id });
    button.addEventListener("click", () => why(d.id));
    cell.append(button);
    row.append(cell);
    return row;
  });
  const body = at("decisions"), held = document.activeElement?.dataset?.id;
  body.replaceChildren(...rows);
  if (held) [...body.querySelectorAll("button")].find((b) => b.dataset.id === held)?.focus();
}

async function why(id) {
  const answer = await fetch(`live/why?id=${encodeURIComponent(id)}`);
  if (!answer.ok) return say("why", `${id}: ${(await answer.text()).trim()}`);
  const explained = await answer.json();
  const panel = at("why");
  const grid = (title, rows, fields) => {
    const made = element("table"), head = element("tr");
    for (const field of ["", ...fields]) head.append(element("th", field.replace(/_s$/, "").replaceAll("_", " "), { scope: "col" }));
    made.append(element("caption", title), head);
    for (const each of rows) {
      const row = element("tr");
      row.append(element("th", each.chosen ? `▸ ${each.id}` : each.id, { scope: "row" }));
      for (const field of fields) row.append(element("td", field.endsWith("_s") ? seconds(each[field]) : whole(Math.round(each[field]))));
      made.append(row);
    }
    return made;
  };
  panel.replaceChildren(
    element("p", `${id}: ${explained.verdict}`),
    grid("prefill", explained.prefills, ["queue_s", "local_tokens", "fetch_tokens", "ttft_local_s", "ttft_fetch_s", "ttft_recompute_s"]),
    grid("decode", explained.decodes, ["batch", "kv_tokens", "free_tokens", "tbt_now_s", "tbt_assigned_s", "tbt_at_join_s"]),
  );
  panel.hidden = false;
  panel.scrollIntoView({ block: "nearest" });
}

async function ask() {
  if (asked || document.hidden) return;
  asked = true;
  try {
    const answer = await fetch(`live/state?after=${after}`);
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    const state = await answer.json();
    if (state.number < after) { // another process answers
      decisions = [], outcomes = [], after = 0;
      return;
    }
    after = state.number;
    decisions = decisions.concat(state.decisions).slice(-KEPT);
    outcomes = outcomes.concat(state.outcomes).slice(-KEPT);
    show(state);
  } catch (error) {
    say("trouble", `The sidecar does not answer (${error.message}); what is shown is old.`);
  } finally {
    asked = false;
  }
}
setInterval(ask, 1000);
document.addEventListener("visibilitychange", ask);
ask();
