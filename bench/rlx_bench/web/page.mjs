// One worker for every engine; commands and answers go over HTTP, so that no debugger is attached.

const workers = new Map();

function workerOf(name) {
  if (!workers.has(name)) workers.set(name, new Worker("worker.mjs", { type: "module" }));
  return workers.get(name);
}

for (;;) {
  const { worker: name, ...command } = await (await fetch("/next")).json();
  if (command.do === "end") {
    workers.get(name)?.terminate();
    workers.delete(name);
  }
  const found = command.do === "end" ? {} : await new Promise((resolve) => {
    const worker = workerOf(name);
    worker.onmessage = (event) => resolve(event.data);
    worker.onerror = (event) => resolve({ error: String(event.message) });
    worker.postMessage(command);
  });
  await fetch("/answer", { method: "POST", body: JSON.stringify(found) });
}
