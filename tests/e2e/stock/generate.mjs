// Generates text greedily in node-llama-cpp's prebuilt binary, with all layers on the device that GGML_BACKEND_PATH adds.
//
// Usage: generate.mjs MODEL PROMPT TOKENS [THREADS [auto]]    one JSON object on stdout, the log on stderr; with `auto`
// node-llama-cpp chooses the number of layers
import {getLlama, LlamaCompletion, LlamaLogLevel} from "node-llama-cpp";

const [modelPath, prompt, tokens, threads, layers] = process.argv.slice(2);
const llama = await getLlama({
    gpu: false, build: "never", skipDownload: true, progressLogs: false, logLevel: LlamaLogLevel.debug,
    logger: (level, message) => process.stderr.write(`${level} ${message}\n`)
});
const model = await llama.loadModel({modelPath, gpuLayers: layers ?? 99});
const context = await model.createContext({contextSize: 512, ...(threads ? {threads: Number(threads)} : {})});
const completion = new LlamaCompletion({contextSequence: context.getSequence()});
const began = process.hrtime.bigint();
const text = await completion.generateCompletion(prompt, {maxTokens: Number(tokens), temperature: 0});
const seconds = Number(process.hrtime.bigint() - began) / 1e9;
console.log(JSON.stringify({text, seconds, layers: model.gpuLayers, build: llama.buildType, release: llama.llamaCppRelease}));
process.exit(0);
