/* memcpy, memmove and memset of the DSP: rt/bytes.rs.
 *
 * A line is 128 bytes at a multiple of 128. `vmem` ignores the low 7 bits of an address; the counts of `valign`, `vlalign`,
 * `vror`, `vsetq` and `vsetq2` ignore the bits above them. `valign(b, a, s)` is bytes s to s + 127 of a, then b;
 * `vlalign(b, a, -s)` is the same, and b for s = 0.
 *
 * Short copies between addresses that are both multiples of 8 or of 4 go through the scalar unit: what it reads next would
 * wait for a store of the vector unit.
 *
 * Registers: r0 destination, also the result; r1 source or byte; r2 count. All registers used here belong to the callee.
 */

/* Copies \count bytes, at least one, that end in the line of \to in which they start. Both lines of the source are read
 * before the store. \from is one of r0 to r7. Changes r8 to r10, v0 to v2, q0 and q1. */
.macro copy_in_line to, from, count
	{ r8 = add(\to, \count)
	  r9 = add(\from, add(\count, #-1))
	  v0 = vmem(\from + #0)
	  q0 = vsetq(\to) }
	{ v1 = vmem(r9 + #0)
	  q1 = vsetq2(r8)
	  r10 = sub(#0, \to) }
	{ v2 = valign(v1, v0, \from)
	  q0 = and(q1, !q0) }
	{ v2 = vror(v2, r10) }
	{ if (q0) vmem(\to + #0) = v2 }
.endm

	.section .text.memcpy, "ax", @progbits
	.globl memcpy
	.type memcpy, @function
	.p2align 5
memcpy:
	{ r3 = or(r0, r1)
	  r4 = r0
	  p0 = cmp.gtu(r2, #127)
	  if (p0.new) jump:nt .Lcopy_lines }
	{ r5 = lsr(r2, #3)
	  p0 = bitsclr(r3, #7)
	  if (!p0.new) jump:nt .Lcopy_words }
	/* Doublewords; each turn stores what the one before has loaded. */
	{ r5 = add(r5, #-1)
	  p0 = cmp.gtu(r2, #7)
	  if (!p0.new) jump:nt .Lcopy_tail }
	{ r7:6 = memd(r1++#8)
	  p0 = cmp.gtu(r2, #15)
	  if (!p0.new) jump:nt .Lcopy_last }
	{ loop0(.Lcopy_double, r5) }
.Lcopy_double:
	{ memd(r4++#8) = r7:6
	  r7:6 = memd(r1++#8) }:endloop0
.Lcopy_last:
	{ memd(r4++#8) = r7:6
	  p0 = bitsclr(r2, #7)
	  if (p0.new) jumpr:t r31 }
.Lcopy_tail:
	{ p0 = tstbit(r2, #2)
	  p1 = tstbit(r2, #1) }
	{ if (p0) r6 = memw(r1++#4)
	  if (p0) memw(r4++#4) = r6.new }
.Lcopy_halves:
	{ if (p1) r6 = memh(r1++#2)
	  if (p1) memh(r4++#2) = r6.new
	  p2 = tstbit(r2, #0) }
	{ if (!p2) jumpr:t r31 }
	{ r6 = memb(r1 + #0)
	  memb(r4 + #0) = r6.new
	  jumpr r31 }

.Lcopy_words:
	{ r5 = lsr(r2, #2)
	  p0 = bitsclr(r3, #3)
	  p1 = cmp.gtu(r2, #63)
	  if (p1.new) jump:nt .Lcopy_lines }
	{ p1 = cmp.gtu(r2, #3)
	  if (!p0) jump:nt .Lcopy_bytes }
	{ p1 = tstbit(r2, #1)
	  if (!p1) jump:nt .Lcopy_halves }
	{ loop0(.Lcopy_word, r5) }
.Lcopy_word:
	{ r6 = memw(r1++#4)
	  memw(r4++#4) = r6.new }:endloop0
	{ jump .Lcopy_halves }

.Lcopy_bytes:
	{ p0 = cmp.gtu(r2, #15)
	  if (p0.new) jump:nt .Lcopy_lines }
	{ p0 = cmp.eq(r2, #0)
	  if (p0.new) jumpr:nt r31 }
	{ loop0(.Lcopy_byte, r2) }
.Lcopy_byte:
	{ r6 = memb(r1++#1)
	  memb(r4++#1) = r6.new }:endloop0
	{ jumpr r31 }

	/* The bytes up to the end of the destination's first line: `copy_in_line`, between the counts of what follows. */
.Lcopy_lines:
	{ r3 = and(r0, #127)
	  v0 = vmem(r1 + #0)
	  q0 = vsetq(r0) }
	{ r3 = sub(#128, r3)
	  r10 = sub(#0, r0) }
	{ r3 = minu(r3, r2) }
	{ r8 = add(r0, r3)
	  r9 = add(r1, add(r3, #-1))
	  r2 = sub(r2, r3)
	  p0 = cmp.gtu(r2, r3) }
	{ v1 = vmem(r9 + #0)
	  q1 = vsetq2(r8)
	  r5 = lsr(r2, #7)
	  p1 = cmp.gtu(r2, #127) }
	{ v2 = valign(v1, v0, r1)
	  q0 = and(q1, !q0)
	  r1 = add(r1, r3) }
	{ v2 = vror(v2, r10)
	  r2 = and(r2, #127)
	  r6 = sub(#0, r1) }
	{ if (q0) vmem(r0 + #0) = v2
	  if (!p0) jumpr:nt r31 }
	/* Whole lines: r8 is the next one; v0 holds the byte before r1, r9 is the last byte of the next 128 from r1 on. */
	{ v0 = v1
	  r9 = add(r1, #127)
	  if (!p1) jump:nt .Lcopy_rest }
	{ loop0(.Lcopy_line, r5) }
.Lcopy_line:
	{ v1.cur = vmem(r9++#1)
	  v2 = vlalign(v1, v0, r6)
	  v0 = v1
	  vmem(r8++#1) = v2.new }:endloop0
.Lcopy_rest:
	{ r9 = add(r9, r2)
	  p0 = cmp.eq(r2, #0)
	  if (p0.new) jumpr:nt r31 }
	{ v1 = vmem(r9 + #-1)
	  q0 = vsetq(r2) }
	{ v2 = vlalign(v1, v0, r6) }
	{ if (q0) vmem(r8 + #0) = v2
	  jumpr r31 }
	.size memcpy, . - memcpy

	/* memcpy never stores to what it still has to load if the destination is below the source. */
	.section .text.memmove, "ax", @progbits
	.globl memmove
	.type memmove, @function
	.p2align 5
memmove:
	{ r3 = sub(r0, r1) }
	{ r5 = add(r0, r2)
	  r4 = add(r1, r2)
	  p0 = cmp.gtu(r2, r3)
	  if (!p0.new) jump:t memcpy }
	/* From the last line to the first: r3 destination, r4 source. */
	{ r3 = add(r5, #-1) }
	{ r5 = and(r3, #127) }
	{ r5 = add(r5, #1) }
	{ r5 = minu(r5, r2)
	  r3 = add(r3, #1) }
	{ r3 = sub(r3, r5)
	  r4 = sub(r4, r5)
	  r2 = sub(r2, r5) }
	copy_in_line r3, r4, r5
	{ r5 = lsr(r2, #7)
	  r6 = r4
	  p0 = cmp.eq(r2, #0)
	  if (p0.new) jumpr:nt r31 }
	{ v1 = vmem(r4 + #0)
	  p0 = cmp.gtu(r2, #127)
	  if (!p0.new) jump:nt .Lmove_first }
	{ loop0(.Lmove_line, r5)
	  r3 = add(r3, #-128)
	  r4 = add(r4, #-128) }
.Lmove_line:
	{ v0.cur = vmem(r4++#-1)
	  v2 = valign(v1, v0, r6)
	  v1 = v0
	  vmem(r3++#-1) = v2.new }:endloop0
.Lmove_first:
	{ r2 = and(r2, #127) }
	{ p0 = cmp.eq(r2, #0)
	  if (p0.new) jumpr:nt r31 }
	copy_in_line r0, r1, r2
	{ jumpr r31 }
	.size memmove, . - memmove

	.section .text.memset, "ax", @progbits
	.globl memset
	.type memset, @function
	.p2align 5
memset:
	{ r1 = vsplatb(r1)
	  r3 = r0
	  p0 = cmp.gtu(r2, #127)
	  if (p0.new) jump:nt .Lfill_lines }
	{ r7:6 = combine(r1, r1)
	  p0 = bitsclr(r0, #7)
	  if (!p0.new) jump:nt .Lfill_words }
	{ r5 = lsr(r2, #3)
	  p0 = cmp.gtu(r2, #7)
	  if (!p0.new) jump:nt .Lfill_tail }
	{ loop0(.Lfill_double, r5) }
.Lfill_double:
	{ memd(r3++#8) = r7:6 }:endloop0
	{ p0 = bitsclr(r2, #7)
	  if (p0.new) jumpr:t r31 }
.Lfill_tail:
	{ p0 = tstbit(r2, #2)
	  p1 = tstbit(r2, #1) }
	{ if (p0) memw(r3++#4) = r1 }
.Lfill_halves:
	{ if (p1) memh(r3++#2) = r1
	  p2 = tstbit(r2, #0) }
	{ if (p2) memb(r3 + #0) = r1
	  jumpr r31 }

.Lfill_words:
	{ r5 = lsr(r2, #2)
	  p0 = bitsclr(r0, #3)
	  p1 = cmp.gtu(r2, #63)
	  if (p1.new) jump:nt .Lfill_lines }
	{ p1 = cmp.gtu(r2, #3)
	  if (!p0) jump:nt .Lfill_bytes }
	{ p1 = tstbit(r2, #1)
	  if (!p1) jump:nt .Lfill_halves }
	{ loop0(.Lfill_word, r5) }
.Lfill_word:
	{ memw(r3++#4) = r1 }:endloop0
	{ jump .Lfill_halves }

.Lfill_bytes:
	{ p0 = cmp.gtu(r2, #15)
	  if (p0.new) jump:nt .Lfill_lines }
	{ p0 = cmp.eq(r2, #0)
	  if (p0.new) jumpr:nt r31 }
	{ loop0(.Lfill_byte, r2) }
.Lfill_byte:
	{ memb(r3++#1) = r1 }:endloop0
	{ jumpr r31 }

.Lfill_lines:
	{ r4 = and(r0, #127)
	  v0 = vsplat(r1)
	  q0 = vsetq(r0) }
	{ r4 = sub(#128, r4) }
	{ r4 = minu(r4, r2) }
	{ r5 = add(r0, r4)
	  r2 = sub(r2, r4)
	  p0 = cmp.gtu(r2, r4) }
	{ q1 = vsetq2(r5)
	  r6 = lsr(r2, #7)
	  p1 = cmp.gtu(r2, #127) }
	{ q0 = and(q1, !q0)
	  r2 = and(r2, #127) }
	{ if (q0) vmem(r0 + #0) = v0
	  if (!p0) jumpr:nt r31 }
	{ q0 = vsetq(r2)
	  p0 = cmp.eq(r2, #0)
	  if (!p1) jump:nt .Lfill_rest }
	{ loop0(.Lfill_line, r6) }
.Lfill_line:
	{ vmem(r5++#1) = v0 }:endloop0
.Lfill_rest:
	{ if (p0) jumpr:nt r31 }
	{ if (q0) vmem(r5 + #0) = v0
	  jumpr r31 }
	.size memset, . - memset
