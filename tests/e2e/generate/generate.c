// Generates text greedily with all layers on the first NPU.
//
// Usage: generate MODEL PROMPT TOKENS    the text on stdout, the log on stderr
#include "llama.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CONTEXT = 512 };

static int fail(const char *what) {
  fprintf(stderr, "generate: %s\n", what);
  return 1;
}

int main(int argc, char **argv) {
  if (argc != 4) {
    return fail("usage: generate MODEL PROMPT TOKENS");
  }
  const char *prompt = argv[2];
  const long n_predict = strtol(argv[3], NULL, 10);

  ggml_backend_load_all();
  struct llama_model_params model_params = llama_model_default_params();
  model_params.n_gpu_layers = 99;
  struct llama_model *model = llama_model_load_from_file(argv[1], model_params);
  if (model == NULL) {
    return fail("cannot load the model");
  }
  const struct llama_vocab *vocab = llama_model_get_vocab(model);
  struct llama_context_params params = llama_context_default_params();
  params.n_ctx = CONTEXT;
  struct llama_context *ctx = llama_init_from_model(model, params);
  if (ctx == NULL) {
    return fail("cannot make a context");
  }

  llama_token tokens[CONTEXT];
  const int32_t n_tokens = llama_tokenize(
      vocab, prompt, (int32_t)strlen(prompt), tokens, CONTEXT, true, true);
  if (n_tokens <= 0 || n_tokens + n_predict > CONTEXT) {
    return fail("too long");
  }
  struct llama_sampler *greedy = llama_sampler_init_greedy();
  struct llama_batch batch = llama_batch_get_one(tokens, n_tokens);
  for (long i = 0; i < n_predict; i++) {
    if (llama_decode(ctx, batch) != 0) {
      return fail("cannot decode");
    }
    llama_token next = llama_sampler_sample(greedy, ctx, -1);
    char piece[256];
    const int32_t length =
        llama_token_to_piece(vocab, next, piece, sizeof(piece), 0, false);
    if (length < 0) {
      return fail("a token that is too long");
    }
    fwrite(piece, 1, (size_t)length, stdout);
    tokens[0] = next;
    batch = llama_batch_get_one(tokens, 1);
  }
  llama_sampler_free(greedy);
  llama_free(ctx);
  llama_model_free(model);
  return 0;
}
