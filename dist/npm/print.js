#!/usr/bin/env node
// Prints the line that sets ggml's variable, for a shell: eval "$(npx ggml-rust-npu)". With --path, the path alone.
import {path, variable} from "./index.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const args = process.argv.slice(2);
if (args.length > 1 || (args.length === 1 && args[0] !== "--path")) {
    console.error("usage: ggml-rust-npu [--path]");
    process.exit(2);
}
console.log(args.length ? path() : `export ${variable}=${quoted(path())}`);
