// Open a bundle's page in headless Chromium and print what it reports:
//
//   node drive_page.mjs MODULES BUNDLE QUERY [PICTURE WIDTH HEIGHT light|dark]
//
// MODULES holds node_modules; the page is served by the bundle's own server. Requests to anywhere
// else end the run.

import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [modules, bundle, query, picture, width, height, scheme] = process.argv.slice(2);
const require = createRequire(pathToFileURL(path.join(modules, "package.json")));
const { chromium } = require("playwright-core");

const SOFTWARE_GPU = [
  "--enable-unsafe-webgpu",
  "--enable-features=Vulkan,WebGPU",
  "--use-webgpu-adapter=swiftshader",
  "--use-vulkan=swiftshader",
  "--ignore-gpu-blocklist",
];

const server = spawn("node", [path.join(bundle, "examples/javascript/serve.mjs"), "0"], {
  stdio: ["ignore", "pipe", "inherit"],
});
const address = await new Promise((done) => {
  server.stdout.once("data", (line) => done(String(line).trim()));
});
const browser = await chromium.launch({
  executablePath: process.env.MHA_EXPORT_CHROMIUM,
  args: ["--no-sandbox", ...SOFTWARE_GPU],
});
try {
  const context = await browser.newContext({
    viewport: { width: Number(width ?? 1100), height: Number(height ?? 900) },
    colorScheme: scheme ?? "light",
    deviceScaleFactor: 1,
  });
  const page = await context.newPage();
  const strangers = [];
  page.on("request", (request) => {
    if (!request.url().startsWith(address) && !/^(data|blob):/.test(request.url())) {
      strangers.push(request.url());
    }
  });
  await page.goto(`${address}examples/javascript/index.html${query}`);
  await page.waitForFunction(() => globalThis.report !== undefined, null, { timeout: 0 });
  page.setDefaultTimeout(0);
  const report = await page.evaluate(() => globalThis.report);
  if (picture) await page.screenshot({ path: picture, fullPage: true });
  const state = await page.evaluate(() => document.body.dataset.state);
  const scrolls = await page.evaluate(
    () => document.documentElement.scrollWidth > document.documentElement.clientWidth,
  );
  console.log(JSON.stringify({ ...report, state, strangers, scrolls }));
} finally {
  await browser.close();
  server.kill();
}
