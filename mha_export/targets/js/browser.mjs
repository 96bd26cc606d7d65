// onnxruntime-web in headless Chromium. The page is served from this process with the headers that
// let it share memory between threads (cross-origin isolation).

import { createServer } from "node:http";
import { readFile } from "node:fs/promises";
import path from "node:path";
import { fileURLToPath } from "node:url";

const HERE = path.dirname(fileURLToPath(import.meta.url));
const TYPES = { ".mjs": "text/javascript", ".js": "text/javascript", ".wasm": "application/wasm" };
const PAGE = "<!doctype html><meta charset=utf-8><script type=module src=/js/page.mjs></script>";

// A browser starts in a second or two; on a machine that is busy elsewhere it was seen to take 30.
const START_MS = 120_000;

// Software WebGPU on SwiftShader: the flags a machine without a GPU needs (Chromium 156).
const SOFTWARE_GPU = [
  "--enable-unsafe-webgpu",
  "--enable-features=Vulkan,WebGPU",
  "--use-webgpu-adapter=swiftshader",
  "--use-vulkan=swiftshader",
  "--ignore-gpu-blocklist",
];

function typeOf(pathname) {
  return pathname === "/" ? "text/html" : (TYPES[path.extname(pathname)] ?? "application/octet-stream");
}

function serve(modules, posted) {
  const server = createServer(async (request, response) => {
    const { pathname } = new URL(request.url, "http://localhost");
    response.setHeader("Cross-Origin-Opener-Policy", "same-origin");
    response.setHeader("Cross-Origin-Embedder-Policy", "require-corp");
    response.setHeader("Content-Type", typeOf(pathname));
    try {
      if (request.method === "POST") {
        const parts = [];
        for await (const part of request) parts.push(part);
        posted.set(pathname, Buffer.concat(parts));
        response.end("ok");
        return;
      }
      if (pathname === "/") return response.end(PAGE, "utf8");
      if (posted.has(pathname)) return response.end(posted.get(pathname));
      const [, root, name] = /^\/(js|ort)\/([\w.-]+)$/.exec(pathname) ?? [];
      const folder = { js: HERE, ort: path.join(modules, "node_modules/onnxruntime-web/dist") }[root];
      if (!folder) throw new Error("no such file");
      response.end(await readFile(path.join(folder, name)));
    } catch {
      response.statusCode = 404;
      response.end();
    }
  });
  return new Promise((done) => server.listen(0, "127.0.0.1", () => done(server)));
}

export async function open({ backendName, modules, require }) {
  const { chromium } = require("playwright-core");
  const files = new Map(); // what the page fetches and posts, by path
  const server = await serve(modules, files);
  const webgpu = backendName === "browser-webgpu";
  const hardware = process.env.MHA_EXPORT_BROWSER_GPU === "1";
  const browser = await chromium.launch({
    timeout: START_MS,
    executablePath: process.env.MHA_EXPORT_CHROMIUM,
    args: ["--no-sandbox", ...(webgpu ? (hardware ? ["--enable-unsafe-webgpu"] : SOFTWARE_GPU) : [])],
  });
  const page = await browser.newPage();
  page.setDefaultTimeout(START_MS);
  const lines = [];
  page.on("console", (message) => {
    lines.push(message.text());
    if (lines.length > 5000) lines.shift();
  });
  await page.goto(`http://127.0.0.1:${server.address().port}/`);
  await page.waitForFunction(() => globalThis.ready === true);

  function share(inputs) {
    return Object.fromEntries(
      Object.entries(inputs).map(([name, { type, dims, bytes }], index) => {
        files.set(`/input/${index}`, bytes);
        return [name, { type, dims, url: `/input/${index}` }];
      }),
    );
  }

  return {
    async load(model, options) {
      files.set("/model.onnx", await readFile(model));
      lines.length = 0;
      const loaded = await page.evaluate((o) => globalThis.load(o), { ...options, webgpu });
      return { ...loaded, device: `${loaded.device}, Chromium ${browser.version()}` };
    },
    async run(inputs) {
      const described = await page.evaluate((i) => globalThis.run(i), share(inputs));
      for (const output of Object.values(described)) {
        output.bytes = files.get(output.url);
        files.delete(output.url);
      }
      return described;
    },
    time: (inputs, repeats, warmup) =>
      page.evaluate(([i, r, w]) => globalThis.time(i, r, w), [share(inputs), repeats, warmup]),
    placement: async () => [...lines],
    async close() {
      await browser.close();
      server.close();
    },
  };
}
