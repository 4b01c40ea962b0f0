// A dynamic linker for a single library, as in FastRPC's shell.

#include "dsp.h"

// SOURCE: System V ABI; Hexagon ABI 80-N2040-23, relocations.
struct program_header {
  uint32_t type, offset, address, physical, file_bytes, bytes, flags, align;
};
struct symbol {
  uint32_t name, value, size;
  uint8_t info, other;
  uint16_t section;
};
struct relocation {
  uint32_t offset, info;
  int32_t addend;
};
enum { PT_LOAD = 1, PT_DYNAMIC = 2, PF_EXECUTE = 1, STB_WEAK = 2 };
enum {
  DT_NEEDED = 1,
  DT_PLTRELSZ = 2,
  DT_HASH = 4,
  DT_STRTAB = 5,
  DT_SYMTAB = 6,
  DT_RELA = 7,
  DT_RELASZ = 8,
  DT_INIT = 12,
  DT_JMPREL = 23,
  DT_HEXAGON_VER = 0x70000001
};
enum {
  R_HEX_32 = 6,
  R_HEX_GLOB_DAT = 33,
  R_HEX_JMP_SLOT = 34,
  R_HEX_RELATIVE = 35
};

// Bytes for the stubs that replace instruction words.
#define STUB_BYTES (1u << 18)
#define MAX_FILE_BYTES (8u << 20)
#define ENTRY "ggml_rust_npu_skel_handle_invoke"

static uint8_t *base;

static const uint8_t *read_file(const char *path) {
  const long here = -100;
  long fd = system_call(SYS_OPENAT, here, (long)path, 0, 0, 0, 0);
  if (is_error(fd))
    die("%s cannot be read, error %d", path, (int)-fd);
  uint8_t *file = map(MAX_FILE_BYTES, -1, 0);
  uint32_t count = 0;
  for (long got = 1; got > 0; count += (uint32_t)got) {
    got = system_call(SYS_READ, fd, (long)(file + count),
                      (long)(MAX_FILE_BYTES - count), 0, 0, 0);
    if (is_error(got) || count == MAX_FILE_BYTES)
      die("%s cannot be read", path);
  }
  system_call(SYS_CLOSE, fd, 0, 0, 0, 0, 0);
  return file;
}

struct dynamic {
  const char *strings;
  const struct symbol *symbols;
  const uint32_t *hash;
  const struct relocation *relocations[2];
  uint32_t relocation_bytes[2];
};

static struct dynamic read_dynamic(const uint32_t *entry) {
  struct dynamic dynamic = {0};
  uint32_t version = 0;
  for (; entry[0]; entry += 2) {
    void *at = base + entry[1];
    switch (entry[0]) {
    case DT_NEEDED:
    case DT_INIT:
      die("the library has a dynamic entry %u, which is not expected",
          entry[0]);
    case DT_STRTAB:
      dynamic.strings = at;
      break;
    case DT_SYMTAB:
      dynamic.symbols = at;
      break;
    case DT_HASH:
      dynamic.hash = at;
      break;
    case DT_RELA:
      dynamic.relocations[0] = at;
      break;
    case DT_RELASZ:
      dynamic.relocation_bytes[0] = entry[1];
      break;
    case DT_JMPREL:
      dynamic.relocations[1] = at;
      break;
    case DT_PLTRELSZ:
      dynamic.relocation_bytes[1] = entry[1];
      break;
    case DT_HEXAGON_VER:
      version = entry[1];
      break;
    }
  }
  // SOURCE: Qualcomm's prebuilt libraries all have 3, and eld writes it.
  if (version != 3)
    die("DT_HEXAGON_VER is %u, not 3", version);
  if (!dynamic.hash || !dynamic.symbols || !dynamic.strings)
    die("no symbol table");
  return dynamic;
}

static uint32_t resolve(const struct dynamic *dynamic, uint32_t index) {
  const struct symbol *symbol = &dynamic->symbols[index];
  if (symbol->section)
    return (uint32_t)base + symbol->value;
  const char *name = dynamic->strings + symbol->name;
  void *at = shell_symbol(name);
  int may_be_missing =
      symbol->info >> 4 == STB_WEAK && !(control->rules & RULE_NO_WEAK);
  if (!at && !may_be_missing)
    die("the shell does not export %s", name);
  return (uint32_t)at;
}

static void relocate(const struct dynamic *dynamic) {
  for (uint32_t table = 0; table < 2; table++) {
    const struct relocation *next = dynamic->relocations[table];
    uint32_t count = dynamic->relocation_bytes[table] / sizeof *next;
    for (; count--; next++) {
      uint32_t *where = (uint32_t *)(base + next->offset);
      switch (next->info & 255) {
      case R_HEX_RELATIVE:
        *where = (uint32_t)base + (uint32_t)next->addend;
        break;
      case R_HEX_32:
      case R_HEX_GLOB_DAT:
      case R_HEX_JMP_SLOT:
        *where = resolve(dynamic, next->info >> 8) + (uint32_t)next->addend;
        break;
      default:
        die("relocation of type %u", next->info & 255);
      }
    }
  }
}

static entry_fn *find_entry(const struct dynamic *dynamic) {
  uint32_t count = dynamic->hash[1];
  for (uint32_t i = 1; i < count; i++) {
    const struct symbol *symbol = &dynamic->symbols[i];
    if (symbol->section && same(dynamic->strings + symbol->name, ENTRY))
      return (entry_fn *)(base + symbol->value);
  }
  die("no symbol " ENTRY);
}

entry_fn *load_library(const char *path) {
  const uint8_t *file = read_file(path);
  if (*(const uint32_t *)file != 0x464c457f)
    die("%s is no ELF file", path);
  const struct program_header *header =
      (const void *)(file + *(const uint32_t *)(file + 28));
  uint32_t count = *(const uint16_t *)(file + 44), end = 0, dynamic_at = 0;
  for (uint32_t i = 0; i < count; i++) {
    if (header[i].type == PT_LOAD && header[i].address + header[i].bytes > end)
      end = header[i].address + header[i].bytes;
    if (header[i].type == PT_DYNAMIC)
      dynamic_at = header[i].address;
  }
  end = (end + PAGE - 1) / PAGE * PAGE;
  base = map(end + STUB_BYTES, -1, 0);
  uint32_t *room = (uint32_t *)(base + end);
  for (uint32_t i = 0; i < count; i++)
    if (header[i].type == PT_LOAD)
      memcpy(base + header[i].address, file + header[i].offset,
             header[i].file_bytes);
  struct dynamic dynamic = read_dynamic((uint32_t *)(base + dynamic_at));
  relocate(&dynamic);
  // Only `.text` is code: words elsewhere may look like instructions.
  const uint32_t *section =
      (const uint32_t *)(file + *(const uint32_t *)(file + 32));
  uint32_t sections = *(const uint16_t *)(file + 48);
  const uint32_t *names = section + 10 * *(const uint16_t *)(file + 50);
  for (uint32_t i = 0; i < sections; i++, section += 10)
    if (same((const char *)file + names[4] + section[0], ".text"))
      trap_words((uint32_t *)(base + section[3]),
                 (uint32_t *)(base + section[3] + section[5]), room,
                 room + STUB_BYTES / 4);
  note("%s loaded at 0x%x", path, (uint32_t)base);
  return find_entry(&dynamic);
}
