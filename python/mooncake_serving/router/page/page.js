// The router's page. What a model, an engine or a request says is text, and never taken as HTML.

const URLS = {
  models: "v1/models",
  chat: "v1/chat/completions",
  instances: "instances",
  decisions: "decisions?limit=200",
};
const POLL_MS = 1000;
const TIMEOUT_MS = 10000;
const MOST_ROWS = 20;
const MOST_TOKENS = 2 ** 61; // of a cache: more means that the engine has not told
const REFUSALS = {
  PREFILL_LOAD: "the first token would come later than its objective",
  DECODE_LOAD: "tokens would come slower than their objective",
  FORECAST_LOAD: "tokens would come slower than their objective once it is prefilled",
  NO_PREFILL_INSTANCE: "no engine that prefills is up",
  NO_DECODE_INSTANCE: "no engine that decodes is up",
  NO_DECODE_ROOM: "no engine has room to decode it",
  TOO_LONG: "it is longer than any engine's cache",
};

const byId = (id) => document.getElementById(id);

function make(tag, className, ...content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...content); // a string becomes text
  return element;
}

// Numbers, for people.

const count = (number) => number.toLocaleString("en-US");
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
const duration = (s) => (s < 1 ? `${(1000 * s).toPrecision(3)} ms` : `${s.toPrecision(3)} s`);
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

function quantile(numbers, share) {
  const sorted = [...numbers].sort((a, b) => a - b);
  return sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)];
}

// Calls of the router.

let key = "";

async function ask(url, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  const answer = await fetch(url, { ...options, headers, cache: "no-store" });
  if (answer.status === 401) byId("key-form").hidden = false;
  return answer;
}

async function askJson(url) {
  const answer = await ask(url, { signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) throw new Error(await errorOf(answer));
  return answer.json();
}

async function errorOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `HTTP ${answer.status}`;
  }
}

// What is watched.

async function watch() {
  for (;;) {
    while (document.hidden) {
      tell("paused while this page is hidden");
      await new Promise((go) => document.addEventListener("visibilitychange", go, { once: true }));
    }
    try {
      const urls = [URLS.models, URLS.instances, URLS.decisions];
      const [models, instances, decisions] = await Promise.all(urls.map(askJson));
      byId("key-form").hidden = true;
      ifChanged("models", models, showModels);
      ifChanged("instances", instances, showInstances);
      ifChanged("decisions", decisions.decisions, showDecisions);
      tell("connected");
    } catch (error) {
      tell(`not connected: ${error.message}`, true);
    }
    await new Promise((go) => setTimeout(go, POLL_MS));
  }
}

function tell(text, isBad = false) {
  const state = byId("state");
  if (state.textContent === text) return; // a screen reader would say it again
  state.textContent = text;
  state.classList.toggle("bad", isBad);
}

const shown = {};

function ifChanged(name, content, show) {
  const text = JSON.stringify(content);
  if (shown[name] === text) return; // what is selected stays so
  shown[name] = text;
  show(content);
}

function showModels({ data }) {
  const select = byId("model");
  const chosen = select.value;
  select.replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === chosen)));
}

// The engines.

function showInstances({ instances, costs }) {
  byId("engines").replaceChildren(...instances.map(engineRow));
  const told = Object.entries(costs).map(([what, cost]) => `${what} ${costText(cost)}`);
  byId("costs").textContent = `Costs: ${told.join("; ")}.`;
}

function engineRow(engine) {
  const state = make("span", engine.up ? "good" : "bad", engine.up ? "up" : "down");
  const name = make("th", "", engine.name, make("div", "detail", `${engine.role}, `, state));
  name.scope = "row";
  const { draining, others_running, others_waiting } = engine;
  if (draining) name.append(make("div", "detail", "gets no more requests"));
  if (others_running || others_waiting) {
    const others = `of others: ${count(others_running)} running, ${count(others_waiting)} waiting`;
    name.append(make("div", "detail", others));
  }
  const knows = engine.capacity_tokens < MOST_TOKENS;
  const cache = make("td", "number", count(engine.kv_tokens));
  if (knows) {
    const share = engine.kv_tokens / engine.capacity_tokens;
    const fill = make("span");
    fill.style.width = percent(Math.min(1, share)).replace(" ", "");
    const meter = make("span", "meter", fill);
    meter.ariaHidden = "true";
    cache.textContent = `${percent(share)} of ${count(engine.capacity_tokens)}`;
    cache.append(meter);
  }
  const numbers = [engine.prefills, engine.decoding].map((n) => make("td", "number", count(n)));
  return make("tr", "", name, ...numbers, cache, make("td", "number", count(engine.held_blocks)));
}

function costText({ source, num_samples, median_error }) {
  const error = num_samples ? `, at the median ${percent(median_error)} off` : "";
  return `${source}, ${count(num_samples)} measurement${num_samples === 1 ? "" : "s"}${error}`;
}

// The decisions.

function showDecisions(entries) {
  const rows = entries.slice(0, MOST_ROWS);
  const scale_s = Math.max(0.001, ...rows.map((entry) => endOf(entry)));
  byId("num-decisions").textContent = count(entries.length);
  byId("scale").textContent = rows.length
    ? `The latest first; a bar from edge to edge is ${duration(scale_s)} from a request's arrival.`
    : "None yet.";
  byId("requests").replaceChildren(...rows.map((entry) => requestRow(entry, scale_s)));
  showSummary(entries);
  for (const entry of lastAttempts(entries)) {
    const place = unmeasured.get(entry.request_id);
    if (!place || !("outcome" in entry)) continue;
    unmeasured.delete(entry.request_id);
    place.textContent = inWords(entry);
  }
}

// Of each request; the latest entries come first.
function lastAttempts(entries) {
  const last = new Map();
  for (const entry of entries) if (!last.has(entry.request_id)) last.set(entry.request_id, entry);
  return [...last.values()];
}

const predictedTtft = (entry) => entry.waited_s + entry.prefill.ttft_s;

function endOf(entry) {
  const predicted = entry.accepted ? predictedTtft(entry) : 0;
  return Math.max(entry.seconds ?? 0, entry.first_byte_s ?? 0, entry.prefilled_s ?? 0, predicted);
}

// What is known of when a request was where, in seconds from its arrival.
function phasesOf({ waited_s, prefilled_s, first_byte_s, seconds }) {
  const phases = [["placing", 0, waited_s]];
  let last_s = waited_s;
  const until = (name, end_s) => {
    if (end_s === undefined) return;
    phases.push([name, last_s, end_s]);
    last_s = end_s;
  };
  until("prefill", prefilled_s);
  until(prefilled_s === undefined ? "prefill" : "handoff", first_byte_s);
  const knowsPrefill = prefilled_s !== undefined || first_byte_s !== undefined;
  until(knowsPrefill ? "decode" : "whole", seconds);
  return phases;
}

function requestRow(entry, scale_s) {
  const at = make("time", "", new Date(1000 * entry.at).toLocaleTimeString());
  const { prefill, decode } = entry;
  const line = make("div", "line", at);
  if (entry.attempt > 1) line.append(make("span", "", `attempt ${entry.attempt}`));
  const cached = prefill && entry.accepted ? `, ${count(prefill.cached_tokens)} cached` : "";
  line.append(make("span", "", `${count(entry.prompt_tokens)} tokens${cached}`));
  if (!entry.accepted) {
    line.append(make("span", "bad", "refused"));
    return make("li", "", line, make("p", "detail", entry.reason));
  }
  const path = prefill.instance === decode?.instance ? [prefill] : [prefill, decode];
  line.append(make("span", "", path.map((one) => one?.instance ?? "not chosen yet").join(" → ")));
  const isBad = entry.outcome && entry.outcome !== "answered";
  line.append(make("span", isBad ? "bad" : "", entry.outcome ?? "under way"));
  return make("li", "", line, bar(entry, scale_s), make("p", "detail", timesOf(entry)));
}

function bar(entry, scale_s) {
  const place = (s) => `${(100 * s) / scale_s}%`;
  const spans = phasesOf(entry).map(([name, begin_s, end_s]) => {
    const span = make("span", name);
    span.style.left = place(begin_s);
    span.style.width = place(Math.max(0, end_s - begin_s));
    return span;
  });
  const tick = make("span", "predicted");
  tick.style.left = `min(${place(predictedTtft(entry))}, 100% - 2px)`;
  const whole = make("div", "bar", ...spans, tick);
  whole.ariaHidden = "true"; // the times are told in words below
  return whole;
}

function timesOf(entry) {
  const { prefill, decode, first_byte_s, tbt_s, seconds } = entry;
  const times = [`first token ${compared("after", first_byte_s, predictedTtft(entry))}`];
  if (prefill.wait_s) times.push(`${duration(prefill.wait_s)} of that in the queue`);
  if (decode) times.push(`a token ${compared("every", tbt_s, decode.tbt_s)}`);
  if (seconds !== undefined) times.push(`over after ${duration(seconds)}`);
  return times.join(", ");
}

function compared(word, measured_s, predicted_s) {
  const measured = measured_s === undefined ? "" : `${word} ${duration(measured_s)}, `;
  return `${measured}predicted ${word} ${duration(predicted_s)}`;
}

function showSummary(entries) {
  const requests = lastAttempts(entries);
  const accepted = entries.filter((entry) => entry.accepted);
  const measured = (name) => accepted.map((entry) => entry[name]).filter((s) => s !== undefined);
  const underWay = requests.filter((entry) => !("outcome" in entry)).length;
  const cached = sum(accepted.map((entry) => entry.prefill.cached_tokens));
  const prompt = sum(accepted.map((entry) => entry.prompt_tokens));
  const facts = [
    ["Requests", count(requests.length), `${count(underWay)} under way`],
    ["Time to first token, median", ...percentiles(measured("first_byte_s"))],
    ["Time between tokens, median", ...percentiles(measured("tbt_s"))],
    ["Measured over predicted TTFT", ...ratios(accepted)],
    ["Cached tokens", prompt ? percent(cached / prompt) : "–", `of ${count(prompt)} in prompts`],
    ["Goodput", ...goodput(requests)],
  ];
  byId("summary").replaceChildren(
    ...facts.map(([name, value, note]) =>
      make("div", "", make("dt", "", name), make("dd", "", value, make("small", "", note))),
    ),
  );
  showRefusals(entries);
}

function percentiles(numbers) {
  if (!numbers.length) return ["–", "no streams measured yet"];
  const at = (share) => duration(quantile(numbers, share));
  return [at(0.5), `p90 ${at(0.9)}, p99 ${at(0.99)}`];
}

function ratios(accepted) {
  const known = accepted.filter((entry) => entry.first_byte_s !== undefined);
  if (!known.length) return ["–", "no streams measured yet"];
  const all = known.map((entry) => entry.first_byte_s / predictedTtft(entry));
  return [`${quantile(all, 0.5).toFixed(2)} ×`, `median; p90 ${quantile(all, 0.9).toFixed(2)} ×`];
}

// Of streams that were answered, and what was refused or has failed: that has met no objectives.
function goodput(requests) {
  const isKnown = ({ outcome = "", first_byte_s }) =>
    outcome === "answered" ? first_byte_s !== undefined : /^(refused|failed)/.test(outcome);
  const known = requests.filter(isKnown);
  const hasOne = ({ objectives }) => (objectives.ttft_s ?? objectives.tbt_s) !== null;
  if (!requests.length) return ["–", "nothing measured yet"];
  if (!requests.some(hasOne)) return ["–", "no objectives are set"];
  if (!known.length) return ["–", "no streams measured yet"];
  const isGood = ({ outcome, objectives, first_byte_s, tbt_s }) =>
    outcome === "answered" &&
    first_byte_s <= (objectives.ttft_s ?? Infinity) &&
    (tbt_s ?? 0) <= (objectives.tbt_s ?? Infinity);
  const good = known.filter(isGood).length;
  return [percent(good / known.length), `${good} of ${known.length} met their objectives`];
}

function showRefusals(entries) {
  const counts = new Map();
  for (const { accepted, why, outcome } of entries) {
    const late = /^refused after its prefill/.test(outcome);
    if (accepted && !late) continue;
    const reason = late ? "after its prefill, when it was looked at again" : REFUSALS[why] ?? why;
    counts.set(reason, (counts.get(reason) ?? 0) + 1);
  }
  byId("refusals-title").hidden = !counts.size;
  byId("refusals").replaceChildren(
    ...[...counts].map(([reason, number]) => make("li", "", `${count(number)}: ${reason}`)),
  );
}

// The chat.

let messages = [];
const unmeasured = new Map(); // where each request is explained that the router has not ended yet
let running = null;

function showMessage(role, text) {
  byId("empty")?.remove();
  const message = make("div", `message ${role}`);
  message.append(make("div", "who", role === "user" ? "You" : "Answer"), make("div", "text", text));
  byId("log").append(message);
  message.scrollIntoView({ block: "nearest" });
  return message;
}

async function send(content) {
  showMessage("user", content);
  const chat = messages; // another one may begin meanwhile
  const message = showMessage("assistant", "");
  const text = message.querySelector(".text").appendChild(new Text());
  const why = message.appendChild(make("p", "why", "waiting for the first token"));
  message.ariaBusy = "true"; // read aloud when it is whole
  chat.push({ role: "user", content });
  setRunning(new AbortController());
  try {
    await receive(text, why, running.signal);
  } catch (error) {
    why.classList.add("bad");
    const what = error.name === "AbortError" ? "stopped" : error.message;
    why.textContent = text.data ? `${why.textContent} Ended early: ${what}` : what;
  } finally {
    message.ariaBusy = "false";
    setRunning(null);
  }
  if (text.data) {
    chat.push({ role: "assistant", content: text.data });
    return;
  }
  chat.pop(); // nothing was answered: it can be sent again
  if (why.classList.contains("bad") && chat === messages) byId("prompt").value ||= content;
}

async function receive(text, why, signal) {
  const body = {
    model: byId("model").value,
    messages,
    max_tokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
    stream: true,
  };
  const answer = await ask(URLS.chat, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!answer.ok) throw new Error(`Not answered (${answer.status}): ${await errorOf(answer)}`);
  const decision = answer.headers.get("x-mooncake-decision");
  why.textContent = decision ? inWords(fromHeader(decision)) : ""; // a proxy may drop it
  unmeasured.set(answer.headers.get("x-request-id"), why);
  const log = byId("log");
  for await (const event of eventsOf(answer.body)) {
    if (event === "[DONE]") return;
    const { error, choices } = JSON.parse(event);
    if (error) throw new Error(error.message);
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    text.appendData(choices?.[0]?.delta?.content ?? "");
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }
  throw new Error("the stream has broken off");
}

async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

// The header of a decision, in the form that /decisions has.
function fromHeader(header) {
  const has = new Map(header.split("; ").map((part) => part.split(/=(.*)/s)));
  const number = (name) => Number(has.get(name));
  return {
    attempt: number("attempt"),
    prompt_tokens: number("prompt_tokens"),
    waited_s: 0,
    prefill: {
      instance: has.get("prefill"),
      cached_tokens: number("cached_tokens"),
      ttft_s: number("ttft_s"),
    },
    decode: has.has("decode") && { instance: has.get("decode"), tbt_s: number("tbt_s") },
  };
}

function inWords(entry) {
  const { attempt, prefill, decode, prompt_tokens, first_byte_s, tbt_s } = entry;
  const isOne = prefill.instance === decode?.instance;
  const cached = `${count(prefill.cached_tokens)} of ${count(prompt_tokens)} tokens were cached there`;
  const words = [
    `${prefill.instance} computed the prompt${isOne ? " and generates" : ""}; ${cached}.`,
    `First token ${compared("after", first_byte_s, predictedTtft(entry))}.`,
  ];
  if (attempt > 1) words.unshift(`Attempt ${attempt}, as an engine had failed.`);
  if (decode) {
    const who = isOne ? "Then" : `${decode.instance} generates,`;
    words.push(`${who} a token ${compared("every", tbt_s, decode.tbt_s)}.`);
  }
  return words.join(" ");
}

function setRunning(controller) {
  running = controller;
  byId("send").disabled = Boolean(running);
  byId("stop").disabled = !running;
}

byId("chat").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = byId("prompt").value.trim();
  if (!content || running) return;
  byId("prompt").value = "";
  send(content);
});

byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("chat").requestSubmit();
});

byId("stop").addEventListener("click", () => running?.abort());

byId("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  unmeasured.clear();
  byId("log").replaceChildren();
  byId("prompt").focus();
});

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value;
  byId("key").value = "";
});

watch();
