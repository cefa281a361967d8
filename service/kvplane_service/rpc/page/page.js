// The status page. It calls the API of this port, and builds every element from text: nothing of an answer is markup.
"use strict";

const INTERVAL_MS = 3000;
const PAGE_SIZE = 1000;

const state = { token: "", paused: false, replicas: [], sort: "replica", descending: false, selected: "", timer: 0 };
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
  const response = await fetch(`api/${method}`, {
    method: "POST", headers, body: JSON.stringify(request), credentials: "omit", cache: "no-store", redirect: "error",
  });
  const answer = await response.json();
  if (!response.ok) throw new Refused(response.status, answer);
  return answer;
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

function cell(value, isNumber) {
  const made = element("td", undefined, isNumber ? "number" : "");
  made.append(value);
  return made;
}

function fill(table, columns, rows) {
  const head = columns.map(([title, isNumber]) => element("th", title, isNumber ? "number" : ""));
  table.tHead.rows[0].replaceChildren(...head);
  table.tBodies[0].replaceChildren(...rows.map((row) => {
    const made = element("tr");
    made.append(...row.map((value, at) => cell(value, columns[at][1])));
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

// ---- the fleet

const COLUMNS = [
  { key: "replica", title: "Replica" },
  { key: "state", title: "State" },
  { key: "share", title: "Pool" },
  { key: "held", title: "Held", number: true },
  { key: "blocks", title: "Blocks", number: true },
  { key: "epoch", title: "Life", number: true },
];

function readReplica(one) {
  const blocks = one.num_blocks - 1;  // without the null block
  const held = blocks - one.free_blocks;
  return {
    replica: one.replica, state: word(one.state, "REPLICA_STATE_"), blocks, held, share: blocks ? held / blocks : 0,
    epoch: Number(one.epoch),
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
  return replicas.map(readReplica);
}

function makeFleetHead() {
  const heads = COLUMNS.map(({ key, title, number }) => {
    const head = element("th", undefined, number ? "number" : "");
    const button = element("button", title);
    button.type = "button";
    button.addEventListener("click", () => {
      state.descending = state.sort === key ? !state.descending : key !== "replica" && key !== "state";
      state.sort = key;
      showFleet();
    });
    head.append(button);
    return head;
  });
  byId("fleet").tHead.rows[0].replaceChildren(...heads);
}

function showFleet() {
  const wanted = byId("filter").value.trim().toLowerCase();
  const shown = state.replicas.filter((one) => `${one.replica} ${one.state}`.toLowerCase().includes(wanted));
  const key = state.sort;
  const order = (a, b) => (a[key] < b[key] ? -1 : a[key] > b[key] ? 1 : a.replica < b.replica ? -1 : 1);
  shown.sort(state.descending ? (a, b) => order(b, a) : order);
  byId("fleet").tHead.rows[0].querySelectorAll("th").forEach((head, at) => {
    const direction = state.descending ? "descending" : "ascending";
    head.setAttribute("aria-sort", COLUMNS[at].key === key ? direction : "none");
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
  const share = `${percent(one.share)} held`;
  row.append(
    cell(button), cell(element("span", one.state, TONES[one.state])), cell(bar(share, ["held", one.share])),
    cell(count(one.held), true), cell(count(one.blocks), true), cell(String(one.epoch), true),
  );
  return row;
}

// ---- one replica

async function select(replica) {
  state.selected = replica;
  byId("explanation").replaceChildren();
  byId("detail").hidden = true;
  showFleet();
  await attempt(showReplica);
  if (!byId("detail").hidden) byId("detail").focus();
}

async function showReplica() {
  const replica = state.selected;
  if (!replica) return;
  const [answer, requests] = await Promise.all([
    call("Allocation/DescribeReplica", { replica }), call("Admin/ListRequests", { replica, limit: 50 }),
  ]);
  if (replica !== state.selected) return;  // another one was selected meanwhile
  byId("detail-title").textContent = replica;
  const facts = factsOf(answer).flatMap(([name, value]) => [element("dt", name), element("dd", value)]);
  byId("facts").replaceChildren(...facts);
  showGroups(answer);
  showRequests(requests);
  byId("detail").hidden = false;
  byId("content").classList.add("with-detail");
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
    ["Requests", `${count(answer.running_requests)} running, ${count(counters.admitted)} admitted`],
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

async function attempt(work) {
  try {
    await work();
    byId("problem").hidden = true;
    return true;
  } catch (error) {
    const isDenied = error instanceof Refused && error.status === 401;
    byId("access").hidden = !isDenied && !state.token;
    if (isDenied) byId("content").hidden = true;
    byId("problem").textContent = isDenied && !state.token ? "This service asks for a token." : error.message;
    byId("problem").hidden = false;
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
  await showReplica();
}

async function tick() {
  clearTimeout(state.timer);
  if (!state.paused && !document.hidden) await attempt(refresh);
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
byId("explain").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(explain);
});
byId("filter").addEventListener("input", showFleet);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName)) {
    event.preventDefault();
    byId("filter").focus();
  }
});
makeFleetHead();
tick();
