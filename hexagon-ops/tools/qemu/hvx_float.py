#!/usr/bin/env python3
"""Adds HVX floating point (V68 to V81) to the source of QEMU 10.0's target/hexagon.

Usage: hvx_float.py SOURCE

Encodings and slots come from LLVM (llvm-mc-22 and clang-22's hvx_hexagon_protos.h); the arithmetic is here. A qfloat value is
held as the IEEE number next to it, rounded to nearest even.

With HVX_QFLOAT=strict in its environment the emulator keeps each qfloat value outside the register file and leaves a mark in
the register, a NaN. A qfloat operand is the value only if the register still has the mark that was written to this very
register. So a copy, a store, a spill or an integer operation turns a qfloat value into NaN.

With HVX_QFLOAT=v79 or v73 it does that, too, and keeps each value with its exponent: a sum that cancels is not shifted to the
left, and a product of such a value is rounded at the place that its exponent gives. v79 is the format of V79 and V81, v73 the
one before. Bits of a NaN, and the sign of a zero, are not the hardware's.

SOURCE: from V79 on "QFloat operands carry four extra precision bits that are silently dropped if the value passes through
a spill slot or a non-HVX instruction", llvm/llvm-project#198902; identical to IEEE 754 when rounded, 80-N2040-61; exponents
and rounding: docs/internals/normalization.md.
"""

import re
import subprocess
import sys
from pathlib import Path

PROTOS = Path("/usr/lib/llvm-22/lib/clang/22/include/hvx_hexagon_protos.h")
MC = ["llvm-mc-22", "--triple=hexagon", "-mcpu=hexagonv81",
      "-mattr=+hvxv81,+hvx-length128b,+hvx-ieee-fp,+hvx-qfloat", "-show-encoding"]

# Reads and writes of a lane by type; `i` counts lanes of the narrower type of an instruction.
READ = {"sf": "hvxfp_sf({0}->uw[i])", "hf": "hvxfp_hf({0}->uh[i])", "w": "{0}->w[i]", "h": "{0}->h[i]"}
WRITE = {"sf": "{0}->uw[i] = hvxfp_us({1});", "hf": "{0}->uh[i] = hvxfp_uh({1});", "w": "{0}->w[i] = {1};",
         "h": "{0}->h[i] = {1};"}
LANES = {"sf": 32, "hf": 64, "w": 32, "h": 64}

TWO = r"V(dd|xx|d|x)32\.(\w+)\+?=\w+\(Vu32\.(\w+),Vv32\.(\w+)\)"
ONE = r"V(dd|d)32\.(\w+)=(?:\w+\()?V(uu|u)32\.(\w+)\)?"


def plain(kind):
    """The IEEE type in whose bits a type is held."""
    return {"qf32": "sf", "qf16": "hf"}.get(kind, kind)


def table():
    """(name, syntax, expression in a, b and for sums c) of each instruction without a predicate."""
    out = []
    for name, op in (("vadd", "a + b"), ("vsub", "a - b")):
        for tag, syntax in (("sf", "d.qf32=(u.sf,v.sf)"), ("qf32", "d.qf32=(u.qf32,v.qf32)"),
                            ("qf32_mix", "d.qf32=(u.qf32,v.sf)"), ("sf_sf", "d.sf=(u.sf,v.sf)"),
                            ("hf", "d.qf16=(u.hf,v.hf)"), ("qf16", "d.qf16=(u.qf16,v.qf16)"),
                            ("qf16_mix", "d.qf16=(u.qf16,v.hf)"), ("hf_hf", "d.hf=(u.hf,v.hf)"),
                            ("sf_hf", "dd.sf=(u.hf,v.hf)")):
            out.append((f"{name}_{tag}", syntax.replace("=", f"={name}"), op))
    out += [("vsub_sf_mix", "d.qf32=vsub(u.sf,v.qf32)", "a - b"), ("vsub_hf_mix", "d.qf16=vsub(u.hf,v.qf16)", "a - b")]
    for tag, syntax in (("qf32_sf", "d.qf32=(u.sf,v.sf)"), ("qf32", "d.qf32=(u.qf32,v.qf32)"), ("sf_sf", "d.sf=(u.sf,v.sf)"),
                        ("qf16_hf", "d.qf16=(u.hf,v.hf)"), ("qf16", "d.qf16=(u.qf16,v.qf16)"),
                        ("qf16_mix_hf", "d.qf16=(u.qf16,v.hf)"), ("hf_hf", "d.hf=(u.hf,v.hf)"),
                        ("qf32_hf", "dd.qf32=(u.hf,v.hf)"), ("qf32_mix_hf", "dd.qf32=(u.qf16,v.hf)"),
                        ("qf32_qf16", "dd.qf32=(u.qf16,v.qf16)"), ("sf_hf", "dd.sf=(u.hf,v.hf)")):
        out.append((f"vmpy_{tag}", syntax.replace("=", "=vmpy"), "a * b"))
    out += [("vmpy_sf_hf_acc", "xx.sf+=vmpy(u.hf,v.hf)", "c + a * b"), ("vmpy_hf_hf_acc", "x.hf+=vmpy(u.hf,v.hf)", "c + a * b")]
    for name, op in (("max", "a > b ? a : b"), ("min", "a < b ? a : b")):
        for kind in ("sf", "hf"):
            out.append((f"v{name}_{kind}", f"d.{kind}=v{name}(u.{kind},v.{kind})", op))
            out.append((f"vf{name}_{kind}", f"d.{kind}=vf{name}(u.{kind},v.{kind})", op))
    for kind, short in (("sf", "qf32"), ("hf", "qf16")):
        out += [(f"vabs_{kind}", f"d.{kind}=vabs(u.{kind})", "__builtin_fabsf(a)"),
                (f"vfneg_{kind}", f"d.{kind}=vfneg(u.{kind})", "-a"),
                (f"vconv_{kind}_{short}", f"d.{kind}=u.{short}", "a"),
                (f"vconv_{short}_{kind}", f"d.{short}=u.{kind}", "a"),
                (f"vconv_{short}_{short}", f"d.{short}=u.{short}", "a")]
        for name, op in (("vabs", "__builtin_fabsf(a)"), ("vneg", "-a")):
            out += [(f"{name}_{short}_{kind}", f"d.{short}={name}(u.{kind})", op),
                    (f"{name}_{short}_{short}", f"d.{short}={name}(u.{short})", op)]
    out += [("vconv_h_hf", "d.h=u.hf", "hvxfp_h(a)"), ("vconv_hf_h", "d.hf=u.h", "(float)a"),
            ("vconv_sf_w", "d.sf=u.w", "(float)a"), ("vconv_w_sf", "d.w=u.sf", "hvxfp_w(a)"),
            ("vcvt_hf_h", "d.hf=vcvt(u.h)", "(float)a"), ("vcvt_h_hf", "d.h=vcvt(u.hf)", "hvxfp_h(__builtin_rintf(a))"),
            ("vcvt_sf_hf", "dd.sf=vcvt(u.hf)", "a"), ("vassign_fp", "d.w=vfmv(u.w)", "a")]
    return [(tag, re.sub(r"\b([duvx]{1,2})\.", r"V\g<1>32.", syntax), op) for tag, syntax, op in out]


# For each kind of instruction, how to compute an expression on qfloat values, and how to read and convert lanes.
RULES = {
    "a + b": "hvxfp_add(a, b, {size})", "a - b": "hvxfp_add(a, hvxfp_negate(b), {size})",
    "a * b": "hvxfp_mul(a, b, {size})", "a": "hvxfp_normal(a, {size})", "-a": "hvxfp_negate(hvxfp_normal(a, {size}))",
    "__builtin_fabsf(a)": "hvxfp_abs(hvxfp_normal(a, {size}))",
}
PARSE = {"sf": "hvxfp_num_sf({0}->uw[i])", "hf": "hvxfp_num_hf({0}->uh[i])", "qf32": "{0}n[i]", "qf16": "{0}n[i]"}


def by_rules(dst, to, operands, expression):
    """The C code of an instruction with a qfloat operand or result, on values with exponents."""
    code, loop = [], []
    for number, (reg, kind, value) in enumerate(operands, 1):
        if kind.startswith("qf"):
            code.append(f"const HvxNum *{reg}n = hvxfp_num_in(env, {number}, 0, &V{reg}V);")
        loop.append(f"HvxNum {value} = {PARSE[kind].format(f'(&V{reg}V)')};".replace(f"(&V{reg}V)n", f"{reg}n"))
    lanes = max(LANES[plain(kind)] for _, kind, _ in operands)
    if to.startswith("qf"):
        halves = ["&VddV.v[0]", "&VddV.v[1]"] if len(dst) == 2 else ["&VdV"]
        place = "n[i & 1][i >> 1]" if len(dst) == 2 else "n[0][i]"
        code.append(f"HvxNum n[{len(halves)}][64];")
        loop.append(f"{place} = {RULES[expression].format(size=to[2:])};")
    else:
        halves = []
        loop.append({"sf": "VdV.uw[i]", "hf": "VdV.uh[i]"}[to] + f" = hvxfp_num_to_{to}(a);")
    code.append(f"for (int i = 0; i < {lanes}; i++) {{ {' '.join(loop)} }}")
    code += [f"hvxfp_num_out(env, {half}, {vector}, n[{half}]);" for half, vector in enumerate(halves)]
    return " ".join(code)


def semantics(syntax, expression):
    """The C code of an instruction on one or two vectors of lanes."""
    two = re.fullmatch(TWO, syntax)
    if two:
        dst, to, *sources = two.groups()
        operands = list(zip("uv", sources, "ab"))
    else:
        dst, to, _, kind = re.fullmatch(ONE, syntax).groups()
        operands = [("u", kind, "a")]
    code = []
    for number, (reg, kind, _) in enumerate(operands, 1):
        if kind.startswith("qf"):
            code.append(f"const MMVector *{reg}s = hvxfp_in(env, {number}, 0, &V{reg}V);")
        else:
            code.append(f"const MMVector *{reg}s = &V{reg}V;")
    lanes = max(LANES[plain(kind)] for _, kind, _ in operands)
    loop = [f"__typeof__({READ[plain(kind)].format(reg + 's')}) {value} = {READ[plain(kind)].format(reg + 's')};"
            for reg, kind, value in operands]
    is_pair = len(dst) == 2
    at = f"V{dst}V.v[i & 1].uw[i >> 1]" if is_pair else None
    if "c" in re.findall(r"\w+", expression):
        loop.append(f"float c = hvxfp_sf({at});" if is_pair else f"float c = {READ[plain(to)].format(f'(&V{dst}V)')};")
    if is_pair:
        loop.append(f"{at} = hvxfp_us({expression});")
    else:
        loop.append(WRITE[plain(to)].format(f"(&V{dst}V)", expression))
    code.append(f"for (int i = 0; i < {lanes}; i++) {{ {' '.join(loop)} }}")
    if to.startswith("qf"):
        halves = ["&VddV.v[0]", "&VddV.v[1]"] if is_pair else ["&VdV"]
        code += [f"hvxfp_out(env, {half}, {vector});" for half, vector in enumerate(halves)]
    if ".qf" in syntax:
        code = [f"if (hvxfp_rules) {{ {by_rules(dst, to, operands, expression)} }} else {{", *code, "}"]
    return "{ " + " ".join(code) + " }"


def instructions():
    """(name, syntax, C code) of every instruction added."""
    out = [(tag, syntax, semantics(syntax, op)) for tag, syntax, op in table()]
    out.append(("vconv_hf_qf32", "Vd32.hf=Vuu32.qf32",
                "{ if (hvxfp_rules) { const HvxNum *even = hvxfp_num_in(env, 1, 0, &VuuV.v[0]); "
                "const HvxNum *odd = hvxfp_num_in(env, 1, 1, &VuuV.v[1]); "
                "for (int i = 0; i < 32; i++) { uint16_t low = hvxfp_num_to_hf(even[i]); "
                "VdV.uh[2 * i + 1] = hvxfp_num_to_hf(odd[i]); VdV.uh[2 * i] = low; } return; } "
                "const MMVector *even = hvxfp_in(env, 1, 0, &VuuV.v[0]); "
                "const MMVector *odd = hvxfp_in(env, 1, 1, &VuuV.v[1]); "
                "for (int i = 0; i < 32; i++) { VdV.uh[2 * i] = hvxfp_uh(hvxfp_sf(even->uw[i])); "
                "VdV.uh[2 * i + 1] = hvxfp_uh(hvxfp_sf(odd->uw[i])); } }"))
    out.append(("vcvt_hf_sf", "Vd32.hf=vcvt(Vu32.sf,Vv32.sf)",
                "{ for (int i = 0; i < 32; i++) { uint16_t even = hvxfp_uh(hvxfp_sf(VuV.uw[i])); "
                "VdV.uh[2 * i + 1] = hvxfp_uh(hvxfp_sf(VvV.uw[i])); VdV.uh[2 * i] = even; } }"))
    dot = "hvxfp_hf(VuV.uh[2 * i]) * hvxfp_hf(VvV.uh[2 * i]) + hvxfp_hf(VuV.uh[2 * i + 1]) * hvxfp_hf(VvV.uh[2 * i + 1])"
    out.append(("vdmpy_sf_hf", "Vd32.sf=vdmpy(Vu32.hf,Vv32.hf)",
                f"{{ for (int i = 0; i < 32; i++) {{ VdV.uw[i] = hvxfp_us({dot}); }} }}"))
    out.append(("vdmpy_sf_hf_acc", "Vx32.sf+=vdmpy(Vu32.hf,Vv32.hf)",
                f"{{ for (int i = 0; i < 32; i++) {{ VxV.uw[i] = hvxfp_us(hvxfp_sf(VxV.uw[i]) + ({dot})); }} }}"))
    for kind, lane, lanes, mask, width in (("sf", "uw", 32, "0xF", 4), ("hf", "uh", 64, "0x3", 2)):
        for compare, op in (("gt", ">"), ("eq", "==")):
            for suffix, assign, combine in (("", "=", ""), ("_and", "&=", "&"), ("_or", "|=", "|"), ("_xor", "^=", "^")):
                q = "x" if suffix else "d"
                old = f"fGETQBITS(QxV,{width},{mask},i * {width}) {combine} " if suffix else ""
                out.append((f"v{compare}{kind}{suffix}", f"Q{q}4{assign}vcmp.{compare}(Vu32.{kind},Vv32.{kind})",
                            f"{{ for (int i = 0; i < {lanes}; i++) {{ fSETQBITS(Q{q}V,{width},{mask},i * {width}, {old}"
                            f"(hvxfp_{kind}(VuV.{lane}[i]) {op} hvxfp_{kind}(VvV.{lane}[i]) ? {mask} : 0)); }} }}"))
    return out


def assembled(syntax, d, u, v):
    """An instruction with its register numbers, as the assembler reads it."""
    def pair(n):
        return f"v{n + 1}:{n}"
    text = re.sub(r"Vdd32|Vxx32", pair(d & 30), syntax)
    text = re.sub(r"Vd32|Vx32", f"v{d}", text)
    text = text.replace("Vuu32", pair(u & 30)).replace("Vu32", f"v{u}").replace("Vv32", f"v{v}")
    return "{ " + re.sub(r"Q[dx]4", f"q{d & 3}", text) + " }"


def encode(lines):
    """The word of each one-instruction packet."""
    run = subprocess.run(MC, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)
    words = [int.from_bytes(bytes(int(byte, 16) for byte in found.split(",")), "little")
             for found in re.findall(r"encoding: \[(.*?)\]", run.stdout)]
    if run.returncode or len(words) != len(lines):
        sys.exit(f"hvx_float.py: llvm-mc-22: {run.stderr}")
    return words


def encoding(tag, syntax, zeros, ones):
    """QEMU's pattern of an instruction from its words with all registers 0 and all registers 31."""
    has_v, is_q, pair_d, pair_u = "Vv32" in syntax, syntax[0] == "Q", re.match("Vdd|Vxx", syntax), "Vuu" in syntax
    fields = (3 if is_q else 30 if pair_d else 31) | (30 if pair_u else 31) << 8 | (31 << 16 if has_v else 0)
    assert zeros ^ ones == fields, f"{tag}: another layout of registers"
    bits = list(f"{zeros:032b}")
    written = "x" if syntax[1] == "x" else "d"
    second = ((20, 16, "v"),) if has_v else ()
    for high, low, letter in ((1 if is_q else 4, 0, written), (12, 8, "u"), *second, (15, 14, "P")):
        bits[31 - high:32 - low] = letter * (high - low + 1)
    text = "".join(bits)
    parts = (text[4], text[5:8], text[8:11], text[11:16], text[16:18], text[18], text[19:24], text[24:27], text[27:])
    return f'DEF_ENC(V6_{tag}, "{text[:4]}"" {" ".join(parts)}")'


def insert(path, marker, text, last=False):
    """Inserts `text` before the first (or last) `marker` of a file."""
    old = path.read_text()
    at = old.rindex(marker) if last else old.index(marker)
    path.write_text(old[:at] + text + old[at:])


def main():
    target = Path(sys.argv[1]) / "target/hexagon"
    here = Path(__file__).resolve().parent
    protos = PROTOS.read_text()
    slots = {re.sub(r"\s+", "", syntax): slot for syntax, slot in
             re.findall(r"Assembly Syntax:\s+(\S.*?)\n.*?Instruction Type:\s+(\w+)", protos, re.S)}
    added = instructions()
    zeros = encode([assembled(syntax, 0, 0, 0) for _, syntax, _ in added])
    ones = encode([assembled(syntax, 31, 31, 31) for _, syntax, _ in added])
    encodings, definitions = [], []
    for (tag, syntax, code), zero, one in zip(added, zeros, ones):
        encodings.append(encoding(tag, syntax, zero, one))
        attributes = "A_CVI,A_" + slots[syntax].replace("_LATE", "") + (",A_CVI_QFLOAT" if ".qf" in syntax else "")
        definitions.append(f'EXTINSN(V6_{tag}, "{syntax}", ATTRIBS(A_EXTENSION,{attributes}), "HVX floating point", {code})')

    path = target / "imported/mmvec/encode_ext.def"
    # Bits that V66's patterns ignore: V68 uses bits 20 to 18 for an opcode, V81 uses bit 13.
    text = "\n".join(re.sub(r"0 ---(\d\d) PP", r"0 000\1 PP", line) if " 1 110 " in line else line
                     for line in path.read_text().split("\n"))
    path.write_text(re.sub(r"( 1 010 000 ----- PP) -", r"\1 0", text))
    old = path.read_text()
    if "#endif" in old:
        insert(path, "#endif", "\n".join(encodings) + "\n", last=True)
    else:
        path.write_text(old + "\n".join(encodings) + "\n")
    insert(target / "imported/mmvec/ext.idef", "ITERATOR_INSN_ANY_SLOT_DOUBLE_VEC(8, shuffeqw", "\n".join(definitions) + "\n\n")
    insert(target / "mmvec/macros.h", "#endif", (here / "hvx_float.h").read_text(), last=True)
    insert(target / "attribs_def.h.inc", "DEF_ATTRIB(CVI_VX_DV,", 'DEF_ATTRIB(CVI_QFLOAT, "Has qfloat operands", "", "")\n')
    insert(target / "cpu.h", "typedef struct CPUArchState {", """
/* HVX_QFLOAT is in the environment; the version whose rules it names, or 0. */
extern bool hvxfp_strict;
extern int hvxfp_rules;

/* A qfloat value: the significand is value / 2^exponent. What rounding took away has the sign of `rest`. */
typedef struct {
    double value;
    int16_t exponent;
    int16_t rest;
} HvxNum;

""")
    insert(target / "cpu.h", "} CPUHexagonState;", """
    /* Registers of the qfloat instruction that runs: result, first and second operand, a byte each. */
    uint32_t qfloat_registers;
    uint32_t qfloat_serial;
    /* The last two qfloat values of each register: a packet reads what it overwrites. */
    struct {
        uint32_t serial;
        MMVector value QEMU_ALIGNED(16);
        HvxNum num[64];
    } qfloat[NUM_VREGS][2];
""")
    insert(target / "op_helper.c", "#include \"helper_funcs_generated.c.inc\"", """bool hvxfp_strict;
int hvxfp_rules;

static void __attribute__((constructor)) hvxfp_init(void)
{
    const char *mode = getenv("HVX_QFLOAT");
    hvxfp_rules = !mode ? 0 : !strcmp(mode, "v79") ? 79 : !strcmp(mode, "v73") ? 73 : 0;
    hvxfp_strict = hvxfp_rules || (mode && !strcmp(mode, "strict"));
}

""")
    insert(target / "hex_common.py", '"A_IMPLICIT_WRITES_USR" in attribdict[tag])\n\n\ndef need_slot',
           '"A_CVI_QFLOAT" in attribdict[tag] or\n            ')
    insert(target / "gen_tcg_funcs.py", '        arguments = ", ".join(declared)\n        f.write(f"    gen_helper_{tag}(', """\
        if "A_CVI_QFLOAT" in hex_common.attribdict[tag]:
            numbers = [hex_common.get_register(tag, *reg).reg_num for reg in regs]
            word = " | ".join(f"{number} << {8 * i}" for i, number in enumerate(numbers))
            f.write("    if (hvxfp_strict) {\\n"
                    f"        tcg_gen_st_i32(tcg_constant_i32({word}), tcg_env,\\n"
                    "                       offsetof(CPUHexagonState, qfloat_registers));\\n"
                    "    }\\n")
""")
    print(len(added), "instructions")


main()
