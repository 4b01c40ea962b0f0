// Where the plugin is, and how a program with node-llama-cpp loads it.
import {createRequire} from "node:module";
import {dirname, join} from "node:path";

const require = createRequire(import.meta.url);

// ggml's own variable: the file of one more backend, for programs that load their backends from files.
export const variable = "GGML_BACKEND_PATH";

/** Returns the folder of the package with the files for this processor. Throws an Error if there is none. */
export function folder() {
    const name = `ggml-rust-npu-${process.platform}-${process.arch}`;
    try {
        return dirname(require.resolve(`${name}/package.json`));
    } catch {
        throw new Error(`the package ${name} is not installed: npm leaves it out with --omit=optional, and there are ` +
            "packages for linux-x64 and linux-arm64 only");
    }
}

/** Returns the path of the plugin. Throws an Error if there is none for this processor. */
export function path() {
    return join(folder(), "lib", "libggml-rust_npu.so");
}

/** Has the next ggml of this process, and of those it starts, load the plugin. Returns its path. */
export function enable() {
    return (process.env[variable] = path());
}

/**
 * node-llama-cpp's `getLlama` with the plugin, in its prebuilt binary for the CPU. `options` are node-llama-cpp's.
 *
 * Give `loadModel` a number as `gpuLayers`: with its other values node-llama-cpp puts no layer on an NPU.
 */
export async function getLlama(options = {}) {
    enable();
    const module = await import("node-llama-cpp");
    return module.getLlama({gpu: false, build: "never", ...options});
}
