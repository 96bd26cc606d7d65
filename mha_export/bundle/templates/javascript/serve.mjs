// Serve the bundle to a browser on this machine: node serve.mjs [PORT]
//
// Two headers let the page share memory between threads; any web server can send them.

import { createServer } from "node:http";
import { readFile } from "node:fs/promises";
import path from "node:path";
import { fileURLToPath } from "node:url";

const HERE = path.dirname(fileURLToPath(import.meta.url));
const BUNDLE = path.resolve(HERE, "../..");
const TYPES = {
  ".html": "text/html", ".css": "text/css", ".json": "application/json",
  ".mjs": "text/javascript", ".js": "text/javascript", ".wasm": "application/wasm",
};

const server = createServer(async (request, response) => {
  const { pathname } = new URL(request.url, "http://localhost");
  response.setHeader("Cross-Origin-Opener-Policy", "same-origin");
  response.setHeader("Cross-Origin-Embedder-Policy", "require-corp");
  if (pathname === "/") {
    response.writeHead(302, { Location: "/examples/javascript/index.html" }).end();
    return;
  }
  const file = path.join(BUNDLE, decodeURIComponent(pathname));
  try {
    if (!file.startsWith(BUNDLE + path.sep)) throw new Error("outside the bundle");
    const bytes = await readFile(file);
    response.setHeader("Content-Type", TYPES[path.extname(file)] ?? "application/octet-stream");
    response.end(bytes);
  } catch {
    response.writeHead(404).end();
  }
});
server.listen(Number(process.argv[2] ?? 8080), "127.0.0.1", () => {
  console.log(`http://127.0.0.1:${server.address().port}/`);
});
