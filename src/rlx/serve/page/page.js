// A chat with the server that this page comes from. Text is only ever set as text, never as HTML.
const part = (id) => document.getElementById(id);
const messages = [];
let running = null; // the controller of the answer that is being written

function show(kind, text) {
  const box = document.createElement("div");
  box.className = kind;
  box.textContent = text;
  part("talk").append(box);
  box.scrollIntoView({ block: "end" });
  return box;
}

function headers() {
  const key = part("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function refusal(response) {
  const said = await response.json().catch(() => null);
  if (response.status === 401) part("settings").open = true;
  return new Error(said?.error?.message ?? `the server answers ${response.status}`);
}

function request() {
  const system = part("system").value.trim();
  const asked = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
  };
  if (part("temperature").value) asked.temperature = Number(part("temperature").value);
  if (part("most").value) asked.max_tokens = Number(part("most").value);
  return asked;
}

// The events of a stream, parsed.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

async function answer(box) {
  const said = { role: "assistant", content: "" };
  const start = performance.now();
  let first = 0, pieces = 0, usage = null;
  const note = () => {
    const seconds = (performance.now() - first) / 1000;
    const count = usage ? usage.completion_tokens : pieces;
    const rate = count > 1 && seconds > 0 ? (count - 1) / seconds : 0;
    part("note").textContent =
      `${count} tokens, ${rate.toFixed(1)} tokens/s, the first after ${((first - start) / 1000).toFixed(2)} s`;
  };
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(request()), signal: running.signal,
    });
    if (!response.ok) throw await refusal(response);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) usage = event.usage;
      const text = event.choices[0]?.delta.content;
      if (text) {
        first ||= performance.now();
        pieces++;
        said.content += text;
        box.textContent = said.content;
        box.scrollIntoView({ block: "end" });
      }
      if (first) note();
    }
    messages.push(said);
  } catch (error) {
    if (error.name === "AbortError") {
      messages.push(said); // what was said so far is kept
      part("note").textContent = "stopped";
    } else {
      messages.pop();
      box.className = "error";
      box.textContent = error.message;
    }
  }
}

async function say() {
  const text = part("text").value.trim();
  if (!text || running) return;
  running = new AbortController();
  part("text").value = part("note").textContent = "";
  part("send").disabled = !(part("stop").disabled = false);
  messages.push({ role: "user", content: text });
  show("user", text);
  await answer(show("assistant", ""));
  running = null;
  part("send").disabled = !(part("stop").disabled = true);
  part("text").focus();
}

part("form").addEventListener("submit", (event) => { event.preventDefault(); say(); });
part("stop").addEventListener("click", () => running?.abort());
part("reset").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  part("talk").replaceChildren();
  part("note").textContent = "";
});
part("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); say(); }
});
part("key").addEventListener("change", name);

async function name() {
  const response = await fetch("v1/models", { headers: headers() });
  if (response.ok) part("model").textContent = (await response.json()).data[0].id;
  else if (response.status === 401) part("settings").open = true;
}
name();
