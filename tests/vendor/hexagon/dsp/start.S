// Entry, stacks, threads, and the way into emulated words.

	.text
	.globl _start
_start:
	{ r0 = r29 }
	{ r29 = and(r29, #-128) }
	{ r31:30 = combine(#0, #0) }
	{ call run_process }
	{ jump _start }

	.globl system_call
system_call:                            // number, six arguments
	{ r6 = r0 ; r0 = r1 }
	{ r1 = r2 ; r2 = r3 }
	{ r3 = r4 ; r4 = r5 }
	{ r5 = memw(r29+#0) }
	{ trap0(#1) }
	{ jumpr r31 }

	.globl call_on_stack
call_on_stack:
	{ allocframe(#8) }
	{ memd(r29+#0) = r17:16 }
	{ r16 = r29 ; r6 = r1 }
	{ r29 = r0 ; r1:0 = combine(r3, r2) }
	{ r2 = r4 ; r3 = r5 }
	{ callr r6 }
	{ r29 = r16 }
	{ r17:16 = memd(r29+#0) }
	{ dealloc_return }

	// The user general pointer of a thread is its block.
	.globl set_thread
set_thread:
	{ ugp = r0 }
	{ jumpr r31 }
	.globl this_thread
this_thread:
	{ r0 = ugp }
	{ jumpr r31 }

	.globl clone_thread
clone_thread:                           // stack end, function, block, word
	{ r7 = r1 ; r8 = r2 }
	{ r1 = r0 ; r6 = #220 }
	// VM FS FILES SIGHAND THREAD SYSVSEM CHILD_CLEARTID
	{ r0 = ##0x250f00 }
	// Kernels differ in which of the two is the word.
	{ r2 = #0 ; r4 = r3 }
	{ trap0(#1) }
	{ p0 = cmp.eq(r0, #0) ; if (!p0.new) jumpr:nt r31 }
	{ ugp = r8 ; r0 = r8 }
	{ r31:30 = combine(#0, #0) }
	{ callr r7 }

	// A copy of this stands for each emulated word. cs0 and cs1 serve
	// circular addressing, which no compiled code uses.
	.globl stub, stub_kind, stub_end
stub:
	{ cs0 = r28 }
	{ cs1 = r31 }
	{ r28 = ##trap }
	{ callr r28 }
stub_kind:
	.word 0
	{ r28 = cs0 }
	{ r31 = cs1 }
stub_end:
	{ nop }

	// Saves all registers in the thread's block, calls
	// emulate(registers, kind), and loads them again. The kind is the word
	// after the call.
trap:
	{ r28 = ugp }
	{ memd(r28+#0) = r1:0 }
	{ memd(r28+#8) = r3:2 }
	{ memd(r28+#16) = r5:4 }
	{ memd(r28+#24) = r7:6 }
	{ memd(r28+#32) = r9:8 }
	{ memd(r28+#40) = r11:10 }
	{ memd(r28+#48) = r13:12 }
	{ memd(r28+#56) = r15:14 }
	{ memd(r28+#64) = r17:16 }
	{ memd(r28+#72) = r19:18 }
	{ memd(r28+#80) = r21:20 }
	{ memd(r28+#88) = r23:22 }
	{ memd(r28+#96) = r25:24 }
	{ memd(r28+#104) = r27:26 }
	{ r0 = cs0 }
	{ memw(r28+#112) = r0 ; r1 = r29 }
	{ memw(r28+#116) = r1 ; r0 = r30 }
	{ memw(r28+#120) = r0 }
	{ r0 = cs1 }
	{ memw(r28+#124) = r0 }
	{ memw(r28+#128) = r31 }
	{ r0 = p3:0 }
	{ memw(r28+#132) = r0 }
	{ r0 = usr }
	{ memw(r28+#136) = r0 }
	{ r0 = lc0 }
	{ memw(r28+#140) = r0 }
	{ r0 = sa0 }
	{ memw(r28+#144) = r0 }
	{ r0 = lc1 }
	{ memw(r28+#148) = r0 }
	{ r0 = sa1 }
	{ memw(r28+#152) = r0 }
	{ r0 = m0 }
	{ memw(r28+#156) = r0 }
	{ r0 = m1 }
	{ memw(r28+#160) = r0 }
	{ r0 = add(r28, #256) ; r1 = ##0x01010101 }
	.irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31
	{ vmem(r0++#1) = v\n }
	.endr
	.irp n, 0,1,2,3
	{ v0 = vand(q\n, r1) }
	{ vmem(r0++#1) = v0 }
	.endr
	{ r16 = r28 ; r0 = r28 ; r1 = memw(r31+#0) }
	{ r29 = memw(r28+##4864) }
	{ call emulate }
	{ r28 = r16 }
	{ r0 = add(r16, ##4352) ; r1 = ##0x01010101 }
	.irp n, 0,1,2,3
	{ v0 = vmem(r0++#1) }
	{ q\n = vand(v0, r1) }
	.endr
	{ r0 = add(r16, #256) }
	.irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31
	{ v\n = vmem(r0++#1) }
	.endr
	{ r0 = memw(r28+#132) }
	{ p3:0 = r0 }
	{ r0 = memw(r28+#136) }
	{ usr = r0 }
	{ r0 = memw(r28+#140) }
	{ lc0 = r0 }
	{ r0 = memw(r28+#144) }
	{ sa0 = r0 }
	{ r0 = memw(r28+#148) }
	{ lc1 = r0 }
	{ r0 = memw(r28+#152) }
	{ sa1 = r0 }
	{ r0 = memw(r28+#156) }
	{ m0 = r0 }
	{ r0 = memw(r28+#160) }
	{ m1 = r0 }
	// An emulated word may have written r28, which the stub takes from cs0.
	{ r0 = memw(r28+#112) }
	{ cs0 = r0 }
	{ r29 = memw(r28+#116) }
	{ r30 = memw(r28+#120) }
	{ r1:0 = memd(r28+#0) }
	{ r3:2 = memd(r28+#8) }
	{ r5:4 = memd(r28+#16) }
	{ r7:6 = memd(r28+#24) }
	{ r9:8 = memd(r28+#32) }
	{ r11:10 = memd(r28+#40) }
	{ r13:12 = memd(r28+#48) }
	{ r15:14 = memd(r28+#56) }
	{ r17:16 = memd(r28+#64) }
	{ r19:18 = memd(r28+#72) }
	{ r21:20 = memd(r28+#80) }
	{ r23:22 = memd(r28+#88) }
	{ r25:24 = memd(r28+#96) }
	{ r27:26 = memd(r28+#104) }
	{ r31 = memw(r28+#128) }
	{ r31 = add(r31, #4) }
	{ jumpr r31 }
