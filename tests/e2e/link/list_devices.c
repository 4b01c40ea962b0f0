// Prints a line for each ggml device: its name, a tab, its description.
#include "ggml-backend.h"

#include <stdio.h>

int main(void) {
  ggml_backend_load_all();
  for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
    ggml_backend_dev_t dev = ggml_backend_dev_get(i);
    printf("%s\t%s\n", ggml_backend_dev_name(dev),
           ggml_backend_dev_description(dev));
  }
  return 0;
}
