// The ggml that loaded the plugin, which is known only at run time.
#pragma once

#include <stdbool.h>
#include <stddef.h>

// Returns the name of the function at `index` in the list of ggml's functions
// that the plugin calls; NULL after the last one.
const char *plugin_import_name(size_t index);

// Returns true if the plugin works without this function.
bool plugin_import_is_optional(size_t index);

// Sets the function at `index`. All required functions are set before anything
// else of ggml-glue/ is called.
void plugin_import_set(size_t index, void *address);
