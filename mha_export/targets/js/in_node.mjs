// onnxruntime-node, and onnxruntime-web's WebAssembly build, inside Node.

import { toBytes, toFeeds, timeRuns } from "./tensors.mjs";

export async function open({ backendName, require }) {
  const wasm = backendName === "wasm";
  const ort = require(wasm ? "onnxruntime-web" : "onnxruntime-node");
  let session;
  return {
    async load(model, { threads = 1 }) {
      if (wasm) ort.env.wasm.numThreads = threads;
      const started = performance.now();
      session = await ort.InferenceSession.create(model, {
        executionProviders: [wasm ? "wasm" : "cpu"],
        graphOptimizationLevel: "all",
        intraOpNumThreads: threads,
        interOpNumThreads: 1,
        extra: { session: { intra_op: { allow_spinning: "0" } } },
      });
      return {
        inputs: session.inputNames,
        outputs: session.outputNames,
        load_ms: performance.now() - started,
        device: wasm ? "WebAssembly in Node" : "CPU",
      };
    },
    run: async (inputs) => toBytes(await session.run(toFeeds(ort, inputs))),
    time: (inputs, repeats, warmup) => timeRuns(session, toFeeds(ort, inputs), repeats, warmup),
    placement: async () => [],
    close: async () => session?.release?.(),
  };
}
