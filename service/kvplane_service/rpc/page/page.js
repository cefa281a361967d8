// The status page. It calls the API of this port, and builds every element from text: nothing of an answer is markup.
"use strict";

const INTERVAL_MS = 3000;
const PAGE_SIZE = 1000;
const MAP_CELLS = 2048;
const LARGE_POOL = 200000;  // blocks: its map is read less often
const MAP_EVERY = 4;  // refreshes

const state = {
  token: "", paused: false, replicas: [], before: new Map(), sort: "state", descending: false, selected: "", filter: "",
  problems: {}, calls: 0, timer: 0, refreshes: 0,
};
const byId = (id) => document.getElementById(id);

class Refused extends Error {
  constructor(status, answer) {
    super(`${answer.message || "the service refused the call"}${answer.remedy ? ` (${answer.remedy})` : ""}`);
    this.status = status;
  }
}

async function call(method, request) {
  const headers = { "Content-Type": "application/json" };
  if (state.token) headers.Authorization = `Bearer ${state.token}`;
  showBusy(1);
  try {
    const response = await fetch(`api/${method}`, {
      method: "POST", headers, body: JSON.stringify(request), credentials: "omit", cache: "no-store", redirect: "error",
    });
    const answer = await response.json();
    if (!response.ok) throw new Refused(response.status, answer);
    return answer;
  } finally {
    showBusy(-1);
  }
}

function showBusy(change) {
  state.calls += change;
  document.body.setAttribute("aria-busy", String(state.calls > 0));
  byId("busy").textContent = state.calls ? "reading" : "";
}

// ---- elements

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function bar(label, ...parts) {
  const made = element("div", undefined, parts.length > 1 ? "bar two" : "bar");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", label);
  made.title = label;
  for (const [className, share] of parts) {
    const part = element("span", undefined, className);
    part.style.width = `${Math.round(1000 * Math.min(1, share)) / 10}%`;
    made.append(part);
  }
  return made;
}

function cell(value, isNumber, title) {
  const made = element("td", undefined, isNumber ? "number" : "");
  if (title) made.dataset.title = title;  // shown before the value where the window is narrow
  made.append(value);
  return made;
}

function fill(table, columns, rows) {
  const head = columns.map(([title, isNumber]) => element("th", title, isNumber ? "number" : ""));
  table.tHead.rows[0].replaceChildren(...head);
  table.tBodies[0].replaceChildren(...rows.map((row) => {
    const made = element("tr");
    made.append(...row.map((value, at) => cell(value, columns[at][1], columns[at][0])));
    return made;
  }));
}

const word = (name, prefix) => name.replace(prefix, "").toLowerCase().replaceAll("_", " ");
const count = (value) => Number(value).toLocaleString("en");
const percent = (share) => `${Math.round(100 * share)} %`;

function age(ms) {
  const seconds = Number(ms) / 1000;
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const TONES = { live: "good", lapsed: "bad", diverged: "bad", recovering: "warn", opening: "warn" };

// ---- the address: what is selected, so that it can be kept, sent and gone back to; never the token

function readAddress() {
  const given = new URLSearchParams(new URL(document.URL).hash.slice(1));
  state.selected = given.get("replica") || "";
  state.filter = given.get("filter") || "";
  const column = COLUMNS.find(({ key }) => key === given.get("sort"));
  state.sort = column ? column.key : "state";
  state.descending = given.get("order") === "descending";
  byId("filter").value = state.filter;
}

function writeAddress(isNew) {
  const given = new URLSearchParams();
  if (state.selected) given.set("replica", state.selected);
  if (state.filter) given.set("filter", state.filter);
  if (state.sort !== "state" || state.descending) given.set("sort", state.sort);
  if (state.descending) given.set("order", "descending");
  const text = given.toString();
  history[isNew ? "pushState" : "replaceState"](null, "", text ? `#${text}` : "#");
}

// ---- the fleet

const ORDER = ["live", "opening", "recovering", "diverged", "idle", "lapsed"];  // of states
const COLUMNS = [
  { key: "replica", title: "Replica", ascends: true },
  { key: "state", title: "State", ascends: true, value: (one) => ORDER.indexOf(one.state) },
  { key: "hit", title: "Hit", number: true, show: (one) => (one.hit === null ? "-" : percent(one.hit)) },
  { key: "running", title: "Running", number: true, show: (one) => count(one.running) },
  { key: "waiting", title: "Waiting", number: true, show: (one) => (one.waiting === null ? "-" : count(one.waiting)) },
  { key: "steps", title: "Steps/s", number: true, show: (one) => (one.steps === null ? "-" : count(Math.round(one.steps))) },
  { key: "share", title: "Pool" },
  { key: "held", title: "Held", number: true, show: (one) => count(one.held) },
  { key: "blocks", title: "Blocks", number: true, show: (one) => count(one.blocks) },
  { key: "model", title: "Model", ascends: true, show: (one) => one.model || "-" },
  { key: "seen", title: "Last seen", ascends: true, show: (one) => (one.seen ? `${age(one.seen)} ago` : "now") },
];

function readReplica(one) {
  const blocks = one.num_blocks - 1;  // without the null block
  const held = blocks - one.free_blocks;
  const queried = Number(one.queried_tokens);
  const now = { at: performance.now(), steps: Number(one.steps) };
  const before = state.before.get(one.replica);
  state.before.set(one.replica, now);
  return {
    replica: one.replica, state: word(one.state, "REPLICA_STATE_"), blocks, held, share: blocks ? held / blocks : 0,
    hit: queried ? Number(one.hit_tokens) / queried : null, running: one.running_requests,
    waiting: one.waiting_requests ?? null, model: one.model_name, seen: Number(one.last_seen_ms),
    steps: before && now.at > before.at ? (1000 * Math.max(0, now.steps - before.steps)) / (now.at - before.at) : null,
  };
}

async function listReplicas() {
  const replicas = [];
  let token = "";
  do {
    const answer = await call("Allocation/ListReplicas", { page_size: PAGE_SIZE, page_token: token });
    replicas.push(...answer.replicas);
    token = answer.next_page_token;
  } while (token);
  const names = new Set(replicas.map((one) => one.replica));
  for (const name of state.before.keys()) if (!names.has(name)) state.before.delete(name);
  return replicas.map(readReplica);
}

function makeFleetHead() {
  const heads = COLUMNS.map(({ key, title, number, ascends }) => {
    const head = element("th", undefined, number ? "number" : "");
    const button = element("button", title);
    button.type = "button";
    button.addEventListener("click", () => {
      state.descending = state.sort === key ? !state.descending : !ascends;
      state.sort = key;
      writeAddress(false);
      showFleet();
    });
    head.append(button);
    return head;
  });
  byId("fleet").tHead.rows[0].replaceChildren(...heads);
  byId("sort").replaceChildren(...COLUMNS.map(({ key, title }) => {
    const option = element("option", title);
    option.value = key;
    return option;
  }));
}

function compare(a, b) {
  const { key, value } = COLUMNS.find((one) => one.key === state.sort);
  const [mine, other] = [a, b].map(value || ((one) => one[key]));
  if (mine !== other) {
    if (mine === null || other === null) return mine === null ? 1 : -1;  // unknown ones are last
    const order = mine < other ? -1 : 1;
    return state.descending ? -order : order;
  }
  return a.replica < b.replica ? -1 : 1;
}

function showFleet() {
  const wanted = state.filter.trim().toLowerCase();
  const shown = state.replicas.filter((one) => `${one.replica} ${one.state} ${one.model}`.toLowerCase().includes(wanted));
  shown.sort(compare);
  byId("sort").value = state.sort;
  byId("fleet").tHead.rows[0].querySelectorAll("th").forEach((head, at) => {
    const direction = state.descending ? "descending" : "ascending";
    head.setAttribute("aria-sort", COLUMNS[at].key === state.sort ? direction : "none");
  });
  const focused = document.activeElement && document.activeElement.dataset.replica;
  byId("fleet").tBodies[0].replaceChildren(...shown.map(fleetRow));
  if (focused) byId("fleet").querySelector(`button[data-replica="${CSS.escape(focused)}"]`)?.focus();
  byId("count").textContent = `${shown.length} of ${state.replicas.length}`;
}

function fleetRow(one) {
  const row = element("tr");
  const button = element("button", one.replica);
  button.type = "button";
  button.dataset.replica = one.replica;
  button.addEventListener("click", () => select(one.replica));
  row.setAttribute("aria-current", String(one.replica === state.selected));
  const special = {
    replica: button, state: element("span", one.state, TONES[one.state]),
    share: bar(`${percent(one.share)} held`, ["held", one.share]),
  };
  row.append(...COLUMNS.map(({ key, title, number, show }) => cell(special[key] || show(one), number, title)));
  return row;
}

// ---- one replica

async function select(replica) {
  state.selected = replica;
  writeAddress(true);
  await showSelected();
  if (!byId("detail").hidden) byId("detail").focus();
}

async function showSelected() {
  byId("explanation").replaceChildren();
  byId("explain-problem").hidden = true;
  byId("detail").hidden = true;
  report("replica", null);
  showFleet();
  await attempt("replica", () => showReplica(true));
}

async function showReplica(isNew) {
  const replica = state.selected;
  byId("content").classList.toggle("with-detail", Boolean(replica));
  if (!replica) return;
  const known = state.replicas.find((one) => one.replica === replica);
  const withMap = isNew || !known || known.blocks < LARGE_POOL || state.refreshes % MAP_EVERY === 0;
  const asked = { replica, with_history: true, map_cells: withMap ? MAP_CELLS : 0 };
  const [answer, requests] = await Promise.all([
    call("Allocation/DescribeReplica", asked), call("Admin/ListRequests", { replica, limit: 50 }),
  ]);
  if (replica !== state.selected) return;  // another one was selected meanwhile
  byId("detail-title").textContent = replica;
  const facts = factsOf(answer).flatMap(([name, value]) => [element("dt", name), element("dd", value)]);
  byId("facts").replaceChildren(...facts);
  byId("detail").hidden = false;
  drawPlots(byId("plots"), byId("plots-note"), answer.history);
  const nameOf = (group) => `group ${group} (${word(answer.spec.groups[group].kind, "GROUP_KIND_")})`;
  if (answer.pool_map) drawMap(byId("map"), byId("map-legend"), answer.pool_map, answer.spec.num_blocks, nameOf);
  showGroups(answer);
  showRequests(requests);
}

function reasons(counts) {
  const parts = Object.entries(counts).filter(([, number]) => Number(number)).sort();
  return parts.map(([reason, number]) => `${count(number)} ${reason.replaceAll("_", " ")}`).join(", ") || "none";
}

function factsOf(answer) {
  const counters = answer.counters;
  const queried = Number(counters.queried_tokens);
  const share = queried ? ` (${percent(Number(counters.hit_tokens) / queried)})` : "";
  const slowest = answer.slowest_steps.slice(0, 3).map((one) => `${(Number(one.took_ns) / 1e6).toFixed(2)} ms`);
  const store = word(answer.store.state, "STORE_STATE_");
  return [
    ["State", `${word(answer.state, "REPLICA_STATE_")}, epoch ${answer.epoch}, step ${count(answer.seq)}`],
    ["Requests", `${count(answer.running_requests)} running, ${answer.waiting_requests ?? "-"} waiting, ${count(counters.admitted)} admitted`],
    ["Hits", `${count(counters.hit_tokens)} of ${count(queried)} tokens looked up${share}`],
    ["Preempted", reasons(answer.preemptions)],
    ["Refused", reasons(answer.refusals)],
    ["Keys removed", reasons(answer.removed_keys)],
    ...answer.tiers.map((tier) => [`Tier: ${word(tier.kind, "TIER_KIND_")}`,
      `${count(tier.held_blocks)} of ${count(tier.num_blocks)} slots, ${count(tier.hit_tokens)} tokens hit by loads`]),
    ...(answer.tiers.length ? [["Loads and saves", reasons(answer.tier_counts)]] : []),
    ["Workers", `${answer.workers.length} of ${answer.num_ranks}`],
    ["Store", answer.store.problem ? `${store}: ${answer.store.problem}` : store],
    ["Slowest steps", slowest.join(", ") || "none"],
  ];
}

function showGroups(answer) {
  const usable = answer.spec.num_blocks - 1;
  const rows = answer.spec.groups.map((group, at) => {
    const counts = answer.counters.groups[at];
    const reach = group.window || group.chunk || "";
    const label = `${count(counts.used_blocks)} held, ${count(counts.cached_blocks)} cached of ${count(usable)}`;
    const shares = bar(label, ["held", counts.used_blocks / usable], ["cached", counts.cached_blocks / usable]);
    return [`${at}: ${word(group.kind, "GROUP_KIND_")} ${reach}`, shares, count(counts.used_blocks),
      count(counts.cached_blocks), count(counts.evicted_blocks)];
  });
  const columns = [["Group"], ["Blocks"], ["Held", true], ["Cached", true], ["Evicted", true]];
  fill(byId("groups"), columns, rows);
}

function showRequests(answer) {
  const rows = answer.requests.map((one) => {
    const blocks = one.num_blocks.reduce((sum, number) => sum + number, 0);
    const stage = one.running ? "running" : one.held ? "held for a transfer" : "waiting";
    return [one.request_id || `slot ${one.slot}`, stage, count(blocks), count(one.computed_tokens), count(one.num_tokens)];
  });
  const columns = [["Request"], ["State"], ["Blocks", true], ["Computed", true], ["Tokens", true]];
  fill(byId("requests"), columns, rows);
  const left = answer.num_requests - rows.length;
  byId("more").textContent = left ? `${count(left)} more` : rows.length ? "" : "no requests";
}

// ---- explain

const CAUSES = {
  nothing: "the hit is as long as possible: the last token is always computed",
  "caching off": "prefix caching is off for this replica",
  "not read": "the request disabled the look-up",
  "below one block": "the prompt is shorter than the smallest possible hit",
  evicted: "the blocks were evicted",
  "left window": "the blocks had left the window of a request, and were evicted first",
  dropped: "the keys were removed",
  withdrawn: "the step that computed them did not run",
  unverified: "a new epoch could not verify the pages",
  "without stamps": "an epoch began without stamps",
  reset: "the cache was reset",
  tentative: "their step is not reported as executed yet",
  "window not resident": "no window that ends there is cached",
  "no state at boundary": "no state is cached at this boundary",
  "other domain": "they were computed in another domain",
  "other salt": "they were computed with another cache salt, or none",
  "other lora": "they were computed with another adapter",
  "other multimodal": "they were computed with other multimodal items",
  differs: "another prompt shares a prefix, then differs",
  "never cached": "they were never computed",
  "in tier": "a tier has these tokens: an admission with LOAD loads them",
  "last block dropped": "the draft group does not use the last block",
  "not recorded": "the decision log does not reach back that far",
};

function explainRequest(text, salt) {
  const pieces = text.split(/[\s,[\]]+/).filter(Boolean);
  if (!pieces.length || !pieces.every((piece) => /^\d+$/.test(piece))) return { request_id: text.trim() };
  return { content: { token_ids: pieces.map(Number), extra_keys: { salt } } };
}

async function explain() {
  const what = explainRequest(byId("prompt").value, byId("salt").value);
  const answer = await call("Admin/Explain", { replica: state.selected, ...what });
  const cause = word(answer.cause, "MISS_CAUSE_");
  const lines = [`${count(answer.hit_tokens)} of ${count(answer.num_tokens)} tokens hit; longest possible hit: ${count(answer.longest_hit)}`];
  const range = answer.end ? `tokens ${count(answer.start)} to ${count(answer.end)}: ` : "";
  lines.push(`Cause: ${range}${CAUSES[cause] || cause}${answer.by ? ` (${answer.by})` : ""}`);
  for (const group of answer.groups) {
    const mark = answer.cut_by.includes(group.group) ? ", limits the hit" : "";
    lines.push(`Group ${group.group} (${word(group.kind, "GROUP_KIND_")}): ${count(group.hit_tokens)} alone${mark}`);
  }
  byId("explanation").replaceChildren(...lines.map((line) => element("div", line)));
}

// ---- the loop

// Shows a problem of one kind until that kind of work succeeds; the time says since when.
function report(kind, error) {
  if (error && state.problems[kind]?.text !== error.message) {
    state.problems[kind] = { text: error.message, since: new Date().toLocaleTimeString() };
  } else if (!error) {
    delete state.problems[kind];
  }
  const lines = Object.values(state.problems).map(({ text, since }) => `${text} (since ${since})`);
  byId("problem").replaceChildren(...lines.map((line) => element("div", line)));
  byId("problem").hidden = !lines.length;
}

async function attempt(kind, work) {
  try {
    await work();
    report(kind, null);
    return true;
  } catch (error) {
    const isDenied = error instanceof Refused && error.status === 401;
    byId("access").hidden = !isDenied && !state.token;
    if (isDenied) byId("content").hidden = true;
    report(kind, isDenied && !state.token ? new Error("This service asks for a token.") : error);
    return false;
  }
}

async function refresh() {
  const [status, replicas] = await Promise.all([call("Admin/Status", {}), listReplicas()]);
  const stage = status.draining ? "draining" : "serving";
  byId("service").textContent = `${status.version}, ${stage} for ${age(status.uptime_ms)}`;
  state.replicas = replicas;
  byId("access").hidden = true;
  byId("content").hidden = false;
  showFleet();
}

async function tick() {
  clearTimeout(state.timer);
  if (!state.paused && !document.hidden && await attempt("service", refresh)) {
    await attempt("replica", () => showReplica(!state.refreshes));
    state.refreshes += 1;
  }
  state.timer = setTimeout(tick, INTERVAL_MS);
}

byId("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  byId("pause").setAttribute("aria-pressed", String(state.paused));
  byId("pause").textContent = state.paused ? "Resume" : "Pause";
  if (!state.paused) tick();
});
byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  state.token = byId("token").value.trim();
  byId("token").value = "";
  tick();
});
byId("explain").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = event.target.querySelector("button");
  button.disabled = true;
  button.textContent = "Explaining";
  byId("explain-problem").hidden = true;
  try {
    await explain();
  } catch (error) {  // it stays until the next question
    byId("explanation").replaceChildren();
    byId("explain-problem").textContent = error.message;
    byId("explain-problem").hidden = false;
    byId("explain-problem").scrollIntoView({ block: "nearest" });
  }
  button.disabled = false;
  button.textContent = "Explain";
});
byId("filter").addEventListener("input", () => {
  state.filter = byId("filter").value;
  writeAddress(false);
  showFleet();
});
byId("sort").addEventListener("change", () => {
  const column = COLUMNS.find(({ key }) => key === byId("sort").value);
  state.sort = column.key;
  state.descending = !column.ascends;
  writeAddress(false);
  showFleet();
});
byId("close").addEventListener("click", () => select(""));
window.addEventListener("popstate", () => {
  readAddress();
  showSelected();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName)) {
    event.preventDefault();
    byId("filter").focus();
  }
});
makeFleetHead();
readAddress();
tick();
