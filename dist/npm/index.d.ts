import type {Llama, LlamaOptions} from "node-llama-cpp";

/** The name of ggml's variable. */
export const variable: "GGML_BACKEND_PATH";
/** Returns the folder of the package with the files for this processor. Throws an Error if there is none. */
export function folder(): string;
/** Returns the path of the plugin. Throws an Error if there is none for this processor. */
export function path(): string;
/** Has the next ggml of this process, and of those it starts, load the plugin. Returns its path. */
export function enable(): string;
/** node-llama-cpp's `getLlama` with the plugin, in its prebuilt binary for the CPU. */
export function getLlama(options?: LlamaOptions): Promise<Llama>;
