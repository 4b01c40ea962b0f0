//! Generates text greedily with all layers of a model on the NPU.
//!
//! Usage: generate MODEL PROMPT TOKENS    the text on stdout, llama.cpp's log on stderr

use std::error::Error;
use std::io::Write;
use std::num::NonZeroU32;

use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::sampling::LlamaSampler;

const CONTEXT: NonZeroU32 = NonZeroU32::new(512).expect("not 0");

/// Number of threads of the CPU backend, which has little to do if there is an NPU. On a Rockchip
/// board, where the CPU computes attention, use the number of big cores.
const CPU_THREADS: i32 = 1;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, prompt, tokens] = arguments.as_slice() else {
        return Err("usage: generate MODEL PROMPT TOKENS".into());
    };
    let n_predict: usize = tokens.parse()?;

    // The only line that concerns the NPU. It must come before the first model is loaded.
    ggml_rust_npu::register()?;

    let backend = LlamaBackend::init()?;
    let params = LlamaModelParams::default().with_n_gpu_layers(99);
    let model = LlamaModel::load_from_file(&backend, model, &params)?;
    let params = LlamaContextParams::default()
        .with_n_ctx(Some(CONTEXT))
        .with_n_threads(CPU_THREADS)
        .with_n_threads_batch(CPU_THREADS);
    let mut context = model.new_context(&backend, params)?;

    let vocab = model.vocab();
    let prompt = vocab.tokenize(prompt.as_bytes(), true, true);
    let mut batch = LlamaBatch::new(prompt.len(), 1);
    batch.add_sequence(&prompt, 0, false)?;
    let mut sampler = LlamaSampler::greedy();
    let mut position = i32::try_from(prompt.len())?;
    let mut out = std::io::stdout().lock();
    for _ in 0..n_predict {
        context.decode(&mut batch)?;
        let token = sampler.sample(&context, batch.n_tokens() - 1);
        out.write_all(&vocab.token_to_piece(token, true, None))?;
        out.flush()?;
        batch.clear();
        batch.add(token, position, &[0], true)?;
        position += 1;
    }
    writeln!(out)?;
    Ok(())
}
