// onnxruntime-node (CPU, or DirectML on Windows), and onnxruntime-web's WebAssembly build, in Node.

import path from "node:path";

import { toBytes, toFeeds, timeRuns } from "./tensors.mjs";

const PROVIDERS = { node: "cpu", wasm: "wasm", directml: { name: "dml", deviceId: 0 } };
const DEVICES = { node: "CPU", wasm: "WebAssembly in Node", directml: "DirectML device 0" };
const NO_FALLBACK = { session: { disable_cpu_ep_fallback: "1" } };
const NO_FUSION = { ep: { dml: { disable_graph_fusion: "1" } } };

export async function open({ backendName, require }) {
  const wasm = backendName === "wasm";
  const directml = backendName === "directml";
  const ort = require(wasm ? "onnxruntime-web" : "onnxruntime-node");
  let session;
  let loaded;

  function create(extra = {}, more = {}) {
    const { model, threads } = loaded;
    return ort.InferenceSession.create(model, {
      executionProviders: [PROVIDERS[backendName]],
      graphOptimizationLevel: "all",
      intraOpNumThreads: threads,
      interOpNumThreads: 1,
      ...(directml ? { enableMemPattern: false, executionMode: "sequential" } : {}),
      ...more,
      extra: { ...extra, session: { intra_op: { allow_spinning: "0" }, ...extra.session } },
    });
  }

  return {
    async load(model, { threads = 1 }) {
      if (wasm) ort.env.wasm.numThreads = threads;
      loaded = { model, threads };
      const started = performance.now();
      await session?.release?.();
      session = undefined;
      let strict = directml;
      try {
        session = await create(directml ? NO_FALLBACK : {});
      } catch (error) {
        // Where the provider leaves nodes to the CPU, the placement is to name them.
        if (!directml || !/fallback/i.test(String(error?.message))) throw error;
        strict = false;
        session = await create();
      }
      return {
        inputs: session.inputNames,
        outputs: session.outputNames,
        load_ms: performance.now() - started,
        device: DEVICES[backendName],
        strict,
      };
    },
    run: async (inputs) => toBytes(await session.run(toFeeds(ort, inputs))),
    time: (inputs, repeats, warmup) => timeRuns(session, toFeeds(ort, inputs), repeats, warmup),
    placement: async () => [],
    // Node by node: a fused graph would be one node of one provider.
    async profile(inputs, folder) {
      const profiled = await create(directml ? NO_FUSION : {}, {
        enableProfiling: true,
        profileFilePrefix: path.join(folder, "profile"),
      });
      await profiled.run(toFeeds(ort, inputs));
      profiled.endProfiling();
      await profiled.release();
    },
    close: async () => session?.release?.(),
  };
}
