// The page's side: tensors are fetched from and posted to the server, never squeezed through JSON.

import { toBytes, toFeeds, timeRuns } from "./tensors.mjs";

let ort;
let session;

async function fetchInputs(described) {
  const inputs = {};
  for (const [name, { type, dims, url }] of Object.entries(described)) {
    inputs[name] = { type, dims, bytes: new Uint8Array(await (await fetch(url)).arrayBuffer()) };
  }
  return toFeeds(ort, inputs);
}

async function adapterName() {
  const adapter = await navigator.gpu?.requestAdapter();
  if (!adapter) throw new Error("this browser found no WebGPU adapter");
  const { vendor, architecture, device, description } = adapter.info;
  return [vendor, architecture, device, description].filter(Boolean).join(" ") || "WebGPU adapter";
}

globalThis.load = async ({ webgpu, threads = 1, verbose = false }) => {
  const device = webgpu ? `WebGPU (${await adapterName()})` : "WebAssembly";
  ort ??= await import(webgpu ? "/ort/ort.webgpu.bundle.min.mjs" : "/ort/ort.wasm.bundle.min.mjs");
  ort.env.wasm.wasmPaths = "/ort/";
  ort.env.wasm.numThreads = threads;
  if (verbose) ort.env.logLevel = "verbose";
  const started = performance.now();
  const before = session;
  session = undefined; // a model that is refused leaves none behind to release again
  await before?.release();
  session = await ort.InferenceSession.create("/model.onnx", {
    executionProviders: [webgpu ? "webgpu" : "wasm"],
    graphOptimizationLevel: "all",
    ...(verbose ? { logSeverityLevel: 0, logVerbosityLevel: 1 } : {}),
  });
  return {
    inputs: session.inputNames,
    outputs: session.outputNames,
    load_ms: performance.now() - started,
    device,
  };
};

globalThis.run = async (described) => {
  const outputs = await toBytes(await session.run(await fetchInputs(described)));
  const replies = {};
  for (const [index, [name, { type, dims, bytes }]] of Object.entries(outputs).entries()) {
    const url = `/output/${index}`;
    await fetch(url, { method: "POST", body: bytes.slice() });
    replies[name] = { type, dims, url };
  }
  return replies;
};

globalThis.time = async (described, repeats, warmup) =>
  timeRuns(session, await fetchInputs(described), repeats, warmup);

globalThis.ready = true;
