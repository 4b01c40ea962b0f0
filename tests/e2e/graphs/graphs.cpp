// Gives a device the graphs of a model that has a shape and no weights.
//
// Usage: graphs tensors MODEL           the tensors that llama.cpp looks for in
// a file that has metadata only, one a line: name, type, dimensions
//        graphs run MODEL FILE NAME...  the workloads of these names; FILE gets
//        the graphs of the last step of each, and stdout
//                                       "NAME FIRST END", the bytes of FILE
//                                       that they take
//
// The device's own record of graphs (GGML_RUST_NPU_TRACE) is FILE. What comes
// before the last step of a workload is cut off.
#include "ggml-backend.h"
#include "gguf.h"
#include "llama.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

// Tokens of a prompt and of a ubatch, and positions of each sequence when the
// last token is decoded.
constexpr int PROMPT = 512;
constexpr int CELLS = 1024;

struct Workload {
  const char *name;
  int tokens; // of the last step, for each sequence
  int sequences;
  int earlier; // tokens of each sequence before the last step
  bool pools;  // the result is a vector for the whole text, without a head
};

constexpr Workload WORKLOADS[] = {
    {"prompt", PROMPT, 1, 0, false},
    {"token", 1, 1, CELLS - 1, false},
    {"sequences", 1, 8, CELLS - 1, false},
    {"text", PROMPT, 1, 0, true},
    {"long-text", 2000, 1, 0, true},
};

[[noreturn]] void fail(const std::string &what) {
  fprintf(stderr, "graphs: %s\n", what.c_str());
  exit(1);
}

void print_tensor(ggml_tensor *tensor, void *) {
  printf("%s %s", tensor->name, ggml_type_name(tensor->type));
  for (int i = 0; i < ggml_n_dims(tensor); i++) {
    printf(" %lld", static_cast<long long>(tensor->ne[i]));
  }
  printf("\n");
}

void print_tensors(const char *path) {
  gguf_context *metadata =
      gguf_init_from_file(path, {/*no_alloc*/ true, /*ctx*/ nullptr});
  if (metadata == nullptr) {
    fail("no metadata");
  }
  llama_model_params params = llama_model_default_params();
  ggml_backend_dev_t cpu[] = {nullptr};
  params.devices = cpu;
  if (llama_model_init_from_user(metadata, print_tensor, nullptr, params) ==
      nullptr) {
    fail("llama.cpp refuses the metadata");
  }
}

off_t size_of(const char *path) {
  struct stat status;
  return stat(path, &status) == 0 ? status.st_size : 0;
}

bool is_encoder(const llama_model *model) {
  char text[64] = "";
  llama_model_meta_val_str(model, "general.architecture", text, sizeof(text));
  return strcmp(text, "bert") == 0;
}

// Computes `tokens` tokens of each sequence from position `first` on, with the
// logits of the last.
void compute(llama_context *ctx, int first, int tokens, int from, int to,
             bool encode) {
  llama_batch batch = llama_batch_init(tokens * (to - from), 0, 1);
  for (int sequence = from; sequence < to; sequence++) {
    for (int i = 0; i < tokens; i++) {
      const int at = batch.n_tokens++;
      batch.token[at] = (first + i) % 1000;
      batch.pos[at] = first + i;
      batch.n_seq_id[at] = 1;
      batch.seq_id[at][0] = sequence;
      batch.logits[at] = i == tokens - 1 || encode;
    }
  }
  if ((encode ? llama_encode(ctx, batch) : llama_decode(ctx, batch)) != 0) {
    fail("the batch failed");
  }
  llama_synchronize(ctx);
  llama_batch_free(batch);
}

void run(llama_model *model, const Workload &work, const char *file) {
  const bool encode = is_encoder(model);
  const off_t kept = size_of(file);
  llama_context_params params = llama_context_default_params();
  params.n_seq_max = work.sequences;
  params.n_ctx = (work.earlier + work.tokens) * work.sequences;
  params.n_batch = work.tokens > PROMPT ? work.tokens : PROMPT;
  params.n_ubatch = params.n_batch;
  params.n_threads = params.n_threads_batch = 2;
  params.embeddings = encode || work.pools;
  if (work.pools && !encode) {
    params.pooling_type = LLAMA_POOLING_TYPE_LAST;
  }
  llama_context *ctx = llama_init_from_model(model, params);
  if (ctx == nullptr) {
    fail("no context");
  }
  for (int sequence = 0; sequence < work.sequences; sequence++) {
    for (int first = 0; first < work.earlier; first += PROMPT) {
      const int rest = work.earlier - first;
      compute(ctx, first, rest < PROMPT ? rest : PROMPT, sequence, sequence + 1,
              encode);
      if (truncate(file, kept) != 0) {
        fail("cannot cut the file");
      }
    }
  }
  const off_t begun = size_of(file);
  compute(ctx, work.earlier, work.tokens, 0, work.sequences, encode);
  printf("%s %lld %lld\n", work.name, static_cast<long long>(begun),
         static_cast<long long>(size_of(file)));
  fflush(stdout);
  llama_free(ctx);
}

void silent(ggml_log_level level, const char *text, void *) {
  if (level >= GGML_LOG_LEVEL_WARN) {
    fputs(text, stderr);
  }
}

} // namespace

int main(int argc, char **argv) {
  llama_log_set(silent, nullptr);
  ggml_backend_load_all();
  if (argc == 3 && strcmp(argv[1], "tensors") == 0) {
    print_tensors(argv[2]);
    return 0;
  }
  if (argc < 5 || strcmp(argv[1], "run") != 0) {
    fail("usage: graphs tensors MODEL | graphs run MODEL FILE NAME...");
  }
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = 999;
  llama_model *model = llama_model_load_from_file(argv[2], params);
  if (model == nullptr) {
    fail("cannot load the model");
  }
  for (int i = 4; i < argc; i++) {
    const Workload *found = nullptr;
    for (const Workload &work : WORKLOADS) {
      found = strcmp(work.name, argv[i]) == 0 ? &work : found;
    }
    if (found == nullptr) {
      fail(std::string("no workload ") + argv[i]);
    }
    run(model, *found, argv[3]);
  }
  llama_model_free(model);
  return 0;
}
