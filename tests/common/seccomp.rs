//! A seccomp filter that makes io_uring unavailable, as container runtimes' default profiles do.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The child, and all it starts, gets EPERM for every io_uring system call.
pub fn refuse_io_uring(command: &mut Command) {
    // SAFETY: the closure runs in the forked child before exec and makes two prctl calls on memory of its own stack;
    // it allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(install);
    }
}

/// io_uring_setup, _enter and _register have these numbers on every architecture.
const FIRST_CALL: u32 = 425;
const LAST_CALL: u32 = 427;

fn install() -> io::Result<()> {
    let refuse = libc::SECCOMP_RET_ERRNO | (libc::EPERM as u32 & libc::SECCOMP_RET_DATA);
    let op = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut program = [
        // Offset 0 of seccomp_data is the number of the system call.
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        op(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 2, FIRST_CALL),
        op(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, 1, 0, LAST_CALL),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, refuse),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: plain integers as prctl(2) asks for.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `filter` points to a program that lives until the call returns; the kernel copies it.
    if unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
