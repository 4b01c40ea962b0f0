#!/usr/bin/env node
// Runs the program ggml-npu, with the folder of the DSP's libraries in FastRPC's variable.
import {spawnSync} from "node:child_process";
import {join} from "node:path";
import {folder} from "./index.js";

const env = {DSP_LIBRARY_PATH: join(folder(), "lib"), ...process.env};
const done = spawnSync(join(folder(), "bin", "ggml-npu"), process.argv.slice(2), {stdio: "inherit", env});
if (done.error) throw done.error;
if (done.signal) process.kill(process.pid, done.signal);
process.exitCode = done.status ?? 1;
