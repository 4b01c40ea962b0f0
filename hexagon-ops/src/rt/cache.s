/* Cache operations on lines that follow each other: rt/cache.rs.
 *
 * r0 address of the first line; r1 number of lines, at least one; r2 bytes from one to the next. Assembly because the compiler puts an instruction that it
 * does not know into a packet of its own, which would take two packets for each line.
 */

	.section .text.ggml_rust_npu_invalidate_lines, "ax", @progbits
	.globl ggml_rust_npu_invalidate_lines
	.type ggml_rust_npu_invalidate_lines, @function
	.p2align 4
ggml_rust_npu_invalidate_lines:
	{ loop0(.Linvalidate_line, r1) }
.Linvalidate_line:
	{ dccleaninva(r0)
	  r0 = add(r0, r2) }:endloop0
	{ jumpr r31 }
	.size ggml_rust_npu_invalidate_lines, . - ggml_rust_npu_invalidate_lines

	.section .text.ggml_rust_npu_clean_lines, "ax", @progbits
	.globl ggml_rust_npu_clean_lines
	.type ggml_rust_npu_clean_lines, @function
	.p2align 4
ggml_rust_npu_clean_lines:
	{ loop0(.Lclean_line, r1) }
.Lclean_line:
	{ dccleana(r0)
	  r0 = add(r0, r2) }:endloop0
	{ jumpr r31 }
	.size ggml_rust_npu_clean_lines, . - ggml_rust_npu_clean_lines
