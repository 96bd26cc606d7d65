// The page: loads the bundle with onnxruntime-web, checks it, times it, and says which provider ran.
// Nothing comes from the network but the bundle itself and onnxruntime-web beside it.

import {
  CheckError, checkAnswer, checkFiles, checkGeneration, choose, generate, inputsOf, readManifest,
} from "./bundle.mjs";

const ORT = new URL("node_modules/onnxruntime-web/", import.meta.url);
const BUNDLE = new URL("../../", import.meta.url);
const [RUNS, LONGEST_MS] = [20, 10_000];
const asked = new URLSearchParams(location.search);
const at = (id) => document.getElementById(id);
const kept = new Map();

async function read(name) {
  if (!kept.has(name)) {
    const response = await fetch(new URL(name, BUNDLE));
    kept.set(name, response.ok ? new Uint8Array(await response.arrayBuffer()) : null);
  }
  return kept.get(name);
}

// onnxruntime-web tells where nodes were placed only in its log.
const log = [];
function listen() {
  for (const name of ["log", "info", "warn", "error", "debug"]) {
    const original = console[name].bind(console);
    console[name] = (...words) => {
      const line = words.join(" ");
      if (/\[[VIWEF]:onnxruntime/.test(line)) log.push(line);
      else original(...words);
    };
  }
}

function checkPlacement(variant, provider) {
  if (provider !== "webgpu") return "WebAssembly is the only provider of the session";
  const attention = new Set(variant.attention_nodes);
  let [where, found] = ["", 0];
  for (const line of log) {
    const placed = /(?:All nodes|Node\(s\)) placed on \[(\w+)\]\. Number of nodes: (\d+)/.exec(line);
    if (placed) where = placed[1];
    if (placed && line.includes("All nodes") && !/WebGpu/.test(where)) {
      throw new CheckError(`provider: all nodes ran on ${where}, not WebGPU`);
    }
    if (placed && line.includes("All nodes")) return `all ${placed[2]} nodes on WebGPU`;
    const node = /\s{2,}\w+ \((.*)\)\s*$/.exec(line);
    if (!node || !attention.has(node[1])) continue;
    if (!/WebGpu/.test(where)) throw new CheckError(`provider: ${node[1]} ran on ${where}, not WebGPU`);
    found += 1;
  }
  if (!found) throw new CheckError("provider: onnxruntime-web did not say where attention ran");
  return `all ${found} attention nodes on WebGPU`;
}

async function adapter() {
  const found = await navigator.gpu?.requestAdapter();
  if (!found) return null;
  const { vendor, architecture, description } = found.info;
  return [vendor, architecture].filter(Boolean).join(" ") || description || "WebGPU adapter";
}

async function openSession(ort, variant, provider) {
  const external = await weightsOf();
  return ort.InferenceSession.create(await read(variant.file), {
    executionProviders: [provider],
    graphOptimizationLevel: "all",
    ...(external ? { externalData: [external] } : {}),
    ...(provider === "webgpu" ? { logSeverityLevel: 0, logVerbosityLevel: 1 } : {}),
  });
}

let manifest;
async function weightsOf() {
  if (!manifest.weights) return null;
  return { path: manifest.weights.split("/").at(-1), data: await read(manifest.weights) };
}

function verdict(state, title, words) {
  document.body.dataset.state = state;
  at("verdict").querySelector("h2").textContent = title;
  at("verdict").querySelector("p").textContent = words;
}

function fact(id, text, small = "") {
  at(id).textContent = text;
  if (small) at(id).append(Object.assign(document.createElement("small"), { textContent: small }));
}

function showAnswer(name, factor) {
  const row = Object.assign(document.createElement("div"), { className: "answer" });
  if (factor > 1) row.classList.add("imprecise");
  const bar = Object.assign(document.createElement("span"), { className: "bar" });
  const fill = document.createElement("i");
  fill.style.width = `${Math.min(100, Math.max(1, factor * 100))}%`;
  bar.append(fill);
  const label = Object.assign(document.createElement("span"), { textContent: name });
  const figure = document.createElement("b");
  figure.textContent = factor <= 1 ? `${Math.round(factor * 100)} %` : `${factor.toFixed(1)} ×`;
  row.append(label, bar, figure);
  at("answers").append(row);
}

function showRuns(times, median) {
  const top = Math.max(...times);
  const height = (ms) => (90 * ms) / top;
  const bars = times.map((ms, i) =>
    `<rect x="${i * 10 + 1}" y="${100 - height(ms)}" width="7" height="${height(ms)}" rx="1.5"/>`);
  const y = 100 - height(median);
  const width = 10 * Math.max(times.length, RUNS);
  at("runs").innerHTML =
    `<svg viewBox="0 0 ${width} 100" preserveAspectRatio="none" role="img" ` +
    `aria-label="latency of each run">${bars.join("")}` +
    `<line x1="0" x2="${width}" y1="${y}" y2="${y}"/></svg>`;
  const figures = [Math.min(...times), median, top].map((ms) => ms.toFixed(1));
  at("runs-note").textContent =
    `Milliseconds, results read back: least ${figures[0]}, median ${figures[1]}, most ${figures[2]}.`;
}

function showInputs() {
  for (const value of manifest.inputs) {
    const row = at("inputs").tBodies[0].insertRow();
    for (const text of [value.name, value.dtype, `[${value.shape.join(", ")}]`, value.meaning]) {
      row.insertCell().textContent = text;
    }
  }
}

async function timed(session, inputs) {
  const [times, began] = [[], performance.now()];
  for (let turn = 0; turn < RUNS + 2; turn += 1) {
    const started = performance.now();
    if (times.length >= 3 && started - began > LONGEST_MS) break;
    const outputs = await session.run(inputs, { logSeverityLevel: 2 });
    for (const tensor of Object.values(outputs)) await tensor.getData();
    if (turn >= 2) times.push(performance.now() - started);
  }
  return { times, median: [...times].sort((a, b) => a - b)[times.length >> 1] };
}

async function showTokens(ort, session) {
  if (!manifest.generation) return;
  at("generation").hidden = false;
  const { prompt, tokens } = manifest.generation;
  const count = tokens.length;
  at("tokens").textContent = `${prompt.join(" ")} →`;
  for await (const token of generate(ort, session, manifest, prompt, count, prompt.length + count)) {
    at("tokens").textContent += ` ${token}`;
  }
  await checkGeneration(ort, session, manifest);
}

async function main() {
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.provider === (asked.get("provider") ?? "")) link.setAttribute("aria-current", "page");
  }
  manifest = await readManifest(read);
  showInputs();
  const gpu = await adapter();
  let providers = gpu ? ["webgpu", "wasm"] : ["wasm"];
  const only = asked.get("provider");
  if (only) {
    if (!providers.includes(only)) throw new CheckError(`provider: ${only} is not in this browser`);
    providers = [only];
  }
  const { version } = JSON.parse(new TextDecoder().decode(await readOrt("package.json")));
  const { variant, provider } = choose(
    manifest, "onnxruntime-web", version, providers, asked.get("target"),
  );
  fact("provider", provider === "webgpu" ? "WebGPU" : "WebAssembly", provider === "webgpu" ? gpu : "");
  const forms = Object.entries(variant.forms).map(([form, count]) => `${count} × ${form}`).join(", ");
  fact("variant", variant.target, forms);
  verdict("running", "Checking files", `${variant.file} and its weights, against their hashes.`);
  const used = new Set([variant.file, manifest.weights, ...manifest.answers.map((a) => a.file)]);
  await checkFiles(read, manifest, (name) => used.has(name));
  if (provider === "webgpu") listen();
  const build = provider === "webgpu" ? "ort.webgpu.bundle.min.mjs" : "ort.wasm.bundle.min.mjs";
  const ort = await import(new URL(`dist/${build}`, ORT));
  ort.env.wasm.wasmPaths = new URL("dist/", ORT).href;
  ort.env.wasm.numThreads = globalThis.crossOriginIsolated ? (navigator.hardwareConcurrency ?? 1) : 1;
  if (provider === "webgpu") ort.env.logLevel = "verbose";
  verdict("running", "Loading", `${variant.target} on ${provider}.`);
  const started = performance.now();
  const session = await openSession(ort, variant, provider);
  const load = performance.now() - started;
  fact("load", `${(load / 1e3).toFixed(2)} s`);
  const placement = checkPlacement(variant, provider);
  const factors = {};
  for (const known of manifest.answers) {
    verdict("running", "Checking answers", known.name);
    const bytes = await read(known.file);
    const outputs = await session.run(inputsOf(ort, bytes, known));
    factors[known.name] = await checkAnswer(bytes, known, outputs);
    showAnswer(known.name, factors[known.name]);
  }
  verdict("running", "Timing", `At most ${RUNS} runs.`);
  const [first] = manifest.answers;
  const { times, median } = await timed(session, inputsOf(ort, await read(first.file), first));
  const sizes = first.inputs[0].shape.join(" × ");
  fact("latency", `${median.toFixed(1)} ms`, `${first.inputs[0].name} ${sizes}`);
  showRuns(times, median);
  await showTokens(ort, session);
  const coarse = Object.values(factors).filter((factor) => factor > 1).length;
  const right = `${manifest.answers.length - coarse} known answers right`;
  const words = `Files as made, ${right}${coarse ? `, ${coarse} imprecise` : ""}, ${placement}.`;
  verdict("passed", "All checks passed", words);
  at("footer").textContent =
    `onnxruntime-web ${version} · ${manifest.generator} · model ${manifest.model.sha256.slice(0, 12)}`;
  return { ok: true, provider, target: variant.target, placement, factors, median_ms: median };
}

async function readOrt(name) {
  const response = await fetch(new URL(name, ORT));
  if (!response.ok) throw new CheckError("onnxruntime-web is not here: run npm install in this folder");
  return response.arrayBuffer();
}

globalThis.report = main().catch((error) => {
  const words = error instanceof CheckError ? error.message : `${error.name}: ${error.message}`;
  verdict("failed", "A check failed", words);
  return { ok: false, reason: words };
});
