//! Users and mount namespaces are those of children: this test's own program, started again.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::*;

/// The variable with the folder for a child process.
const FOLDER: &str = "NPU_TEST_LOCK_FOLDER";

/// Lets one test at a time run: a child that another one starts has all descriptors of this program
/// until it runs its own, and a lock lasts as long as any of them.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a new folder that everyone may write to, as `/run/lock` is.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("npu-lock-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o1777)).unwrap();
    folder
}

/// Takes a seat at the NPU of a made-up system: its DRM nodes are in `folder/sys`, its device nodes
/// in `folder/dev`.
fn seat_in(folder: &Path) -> Result<Seat> {
    take(&Places {
        drm_class: &folder.join("sys"),
        dev: &folder.join("dev"),
        mountinfo: &folder.join("mountinfo"),
        run: vec![folder.into()],
    })
}

/// As [`seat_in`], with the turn, for which it does not wait.
fn turn_in(folder: &Path) -> Result<Seat> {
    let seat = seat_in(folder)?;
    seat.begin_turn(Duration::ZERO)?;
    Ok(seat)
}

/// A process that tries the lock of a node.
fn is_locked(node: &Path) -> bool {
    node::is_locked(&open(node, at_once).unwrap(), TURN).unwrap()
}

/// A process that had forked could not load a second model: its child still had the lock of the
/// first.
#[test]
fn a_lock_that_is_given_back_is_free_though_a_copy_of_its_file_is_open() {
    let _turn = turn();
    let folder = folder("copy");
    with_node(&folder, "card1", "RKNPU");
    let taken = turn_in(&folder).unwrap();
    let copies: Vec<File> = (taken.nodes.iter())
        .map(|(_, file)| file.try_clone().unwrap())
        .collect();
    assert!(turn_in(&folder).is_err());
    drop(taken);
    let again = turn_in(&folder).unwrap();
    assert!(!again.has_company());
    assert_eq!(copies.len(), 1);
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn the_turn_is_waited_for_while_another_process_has_it() {
    let _turn = turn();
    let folder = folder("wait");
    with_node(&folder, "card1", "RKNPU");
    let other = turn_in(&folder).unwrap();
    let patience = Duration::from_millis(60);
    let begun = Instant::now();
    let seat = seat_in(&folder).unwrap();
    let refused = seat.begin_turn(patience).unwrap_err().to_string();
    assert!(
        refused.contains("card1") && refused.contains("0.06 s"),
        "{refused}"
    );
    assert!(begun.elapsed() >= patience, "not waited for");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| seat.begin_turn(Duration::from_secs(60)));
        std::thread::sleep(patience);
        other.end_turn();
        assert!(waiting.join().unwrap().is_ok());
    });
    assert!(turn_in(&folder).is_err());
    seat.end_turn();
    turn_in(&folder).unwrap();
    fs::remove_dir_all(&folder).unwrap();
}

/// Without the queue, a process that computes without a pause gets the turn again before a waiting
/// one notices that it is free.
#[test]
fn processes_that_want_the_turn_all_the_time_alternate() {
    let _turn = turn();
    let folder = folder("fair");
    with_node(&folder, "card1", "RKNPU");
    with_node(&folder, "renderD129", "RKNPU");
    let order = Mutex::new(Vec::new());
    // The second holder arrives after the first one was alone for a while.
    let start = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        for process in 0..2 {
            let (folder, order, start) = (&folder, &order, &start);
            scope.spawn(move || {
                if process == 1 {
                    start.wait();
                }
                let seat = seat_in(folder).unwrap();
                for turn in 0..50 - 10 * process {
                    if (process, turn) == (0, 10) {
                        start.wait();
                    }
                    seat.begin_turn(PATIENCE).unwrap();
                    order.lock().unwrap().push(process);
                    std::thread::sleep(Duration::from_millis(2));
                    seat.end_turn();
                }
            });
        }
    });
    let order = order.into_inner().unwrap();
    let changes = order.windows(2).filter(|two| two[0] != two[1]).count();
    assert!(changes > 40, "{changes} changes: {order:?}");
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_process_that_keeps_the_turn_is_named_and_one_that_dies_gives_it_back() {
    let _turn = turn();
    let folder = folder("dies");
    with_node(&folder, "card1", "RKNPU");
    let Some(program) = own_program() else { return };
    let mut other = Other::start(Command::new(program), &folder);
    let pid = other.process.id();
    let seat = seat_in(&folder).unwrap();
    assert!(seat.has_company());
    let named = format!("({pid})");
    assert!(seat.company().unwrap().contains(&named));
    let limit = Duration::from_millis(20);
    let text = seat.begin_turn(limit).unwrap_err().to_string();
    assert!(text.contains(&named), "{text}");
    other.process.kill().unwrap();
    other.process.wait().unwrap();
    seat.begin_turn(limit).unwrap();
    assert!(!seat.has_company());
    assert_eq!(seat.company(), None);
    fs::remove_dir_all(&folder).unwrap();
}

fn with_node(folder: &Path, name: &str, driver: &str) -> PathBuf {
    let device = folder.join("sys").join(name).join("device");
    fs::create_dir_all(&device).unwrap();
    std::os::unix::fs::symlink(format!("../../bus/drivers/{driver}"), device.join("driver"))
        .unwrap();
    let nodes = folder.join("dev/dri");
    fs::create_dir_all(&nodes).unwrap();
    let node = nodes.join(name);
    fs::write(&node, "").unwrap();
    node
}

/// The child's part: gets the turn, prints that it has it, and keeps it until its input ends.
#[test]
#[ignore = "a child of the other tests"]
fn child() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else {
        println!("skipped: nothing to do without {FOLDER}");
        return;
    };
    match turn_in(&folder) {
        Ok(taken) => {
            println!("TAKEN");
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            drop(taken);
        }
        Err(error) => println!("REFUSED {error}"),
    }
}

/// A child process and the line that it printed.
struct Other {
    process: Child,
    _output: BufReader<ChildStdout>,
    said: String,
}

impl Other {
    fn start(mut command: Command, folder: &Path) -> Self {
        let process = command
            .args([
                "--exact",
                "rockchip::driver::lock::tests::child",
                "--ignored",
                "--nocapture",
            ])
            .env(FOLDER, folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut process = process.unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut said = String::new();
        while !said.contains("TAKEN") && !said.contains("REFUSED") {
            said.clear();
            assert!(
                output.read_line(&mut said).unwrap() > 0,
                "the child said nothing"
            );
        }
        Self {
            process,
            _output: output,
            said,
        }
    }

    fn end(mut self) {
        drop(self.process.stdin.take());
        self.process.wait().unwrap();
    }
}

/// Returns the path of this program; `None`, with the reason printed, where the system does not
/// start it: under an emulator of its processor that started it itself.
fn own_program() -> Option<PathBuf> {
    let program = std::env::current_exe().unwrap();
    let listed = Command::new(&program)
        .arg("--list")
        .stdout(Stdio::null())
        .status();
    if !listed.is_ok_and(|status| status.success()) {
        println!("skipped: the system does not start {}", program.display());
        return None;
    }
    Some(program)
}

/// This program as another user; `None`, with the reason printed, for who may not start one.
fn as_user(user: u32) -> Option<Command> {
    let mut command = Command::new("/bin/true");
    if command.uid(user).gid(user).status().is_err() {
        println!("skipped: only root starts processes of other users");
        return None;
    }
    let mut command = Command::new(own_program()?);
    command.uid(user).gid(user);
    Some(command)
}

/// Runs this program in a separate mount namespace, after `setup`. Returns `None`, with the reason
/// printed, if that is not allowed.
fn in_namespace(setup: &str) -> Option<Command> {
    let mut command = Command::new("unshare");
    let status = command
        .args(["--mount", "true"])
        .stderr(Stdio::null())
        .status();
    if !status.is_ok_and(|status| status.success()) {
        println!("skipped: no mount namespaces for this user");
        return None;
    }
    let exe = own_program()?;
    let mut command = Command::new("unshare");
    // The test program's path may contain a space.
    let script = format!("{setup}\nexec \"$0\" \"$@\"");
    command.args(["--mount", "sh", "-ec", &script]).arg(exe);
    Some(command)
}

fn refusal(result: Result<Seat>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn one_process_has_the_turn_and_the_others_have_seats() {
    let _turn = turn();
    let folder = folder("once");
    for node in [None, Some("card1")] {
        if let Some(name) = node {
            with_node(&folder, name, "RKNPU");
        }
        let held = turn_in(&folder).unwrap();
        assert!(!held.has_company());
        let text = refusal(turn_in(&folder));
        assert!(text.contains("another process"), "{text}");
        assert!(text.contains(node.unwrap_or(FILE)), "{text}");
        let other = seat_in(&folder).unwrap();
        assert!(held.has_company() && other.has_company());
        drop(held);
        assert!(!other.has_company());
        other.begin_turn(Duration::ZERO).unwrap();
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn only_nodes_of_the_npu_are_locked() {
    let _turn = turn();
    let folder = folder("nodes");
    let display = with_node(&folder, "card0", "rockchip-drm");
    let npu = with_node(&folder, "card1", "RKNPU");
    let render = with_node(&folder, "renderD129", "RKNPU");
    // The class has connectors as well, which have no driver.
    fs::create_dir_all(folder.join("sys/card0-HDMI-A-1/device")).unwrap();
    let taken = turn_in(&folder).unwrap();
    assert!(is_locked(&npu) && is_locked(&render) && !is_locked(&display));
    drop(taken);
    // The vendor's driver without DRM.
    fs::remove_dir_all(folder.join("sys")).unwrap();
    let misc = folder.join("dev/rknpu");
    fs::write(&misc, "").unwrap();
    let _taken = turn_in(&folder).unwrap();
    assert!(is_locked(&misc) && !is_locked(&npu));
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_second_user_and_root_after_a_user_get_the_npu_or_one_line() {
    let _turn = turn();
    for node in [false, true] {
        let folder = folder(if node { "users-node" } else { "users" });
        if node {
            let node = with_node(&folder, "card1", "RKNPU");
            fs::set_permissions(&node, fs::Permissions::from_mode(0o666)).unwrap();
        }
        let Some(first) = as_user(12345) else { return };
        let first = Other::start(first, &folder);
        assert!(first.said.contains("TAKEN"), "{}", first.said);
        let text = refusal(turn_in(&folder));
        assert!(text.contains("another process"), "{text}");
        let second = Other::start(as_user(12346).unwrap(), &folder);
        assert!(second.said.contains("another process"), "{}", second.said);
        first.end();
        second.end();
        // Files left by the first user do not stop another user.
        drop(turn_in(&folder).unwrap());
        let second = Other::start(as_user(12346).unwrap(), &folder);
        assert!(second.said.contains("TAKEN"), "{}", second.said);
        second.end();
        fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn a_user_without_access_to_the_nodes_is_told_the_groups() {
    let _turn = turn();
    let folder = folder("groups");
    let node = with_node(&folder, "renderD129", "RKNPU");
    fs::set_permissions(&node, fs::Permissions::from_mode(0o660)).unwrap();
    if let Some(user) = as_user(12345) {
        let user = Other::start(user, &folder);
        for word in ["REFUSED", "renderD129", "video and render"] {
            assert!(user.said.contains(word), "{}", user.said);
        }
        user.end();
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn containers_that_share_the_node_keep_each_other_out() {
    let _turn = turn();
    let folder = folder("containers");
    with_node(&folder, "card1", "RKNPU");
    // Bind-mounts the folder, as `docker run -v /dev/dri:/dev/dri` does.
    let dri = folder.join("dev/dri");
    let bind = format!("mount --bind {0} {0}", dri.display());
    if let Some(command) = in_namespace(&bind) {
        let first = Other::start(command, &folder);
        assert!(first.said.contains("TAKEN"), "{}", first.said);
        let second = Other::start(in_namespace(&bind).unwrap(), &folder);
        assert!(second.said.contains("another process"), "{}", second.said);
        first.end();
        second.end();
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_node_of_the_container_s_own_is_told_from_the_host_s() {
    let _turn = turn();
    let host = "3 27 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw,mode=755\n";
    let docker = "563 562 0:71 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k\n\
                  567 563 0:5 /dri /dev/dri rw,nosuid master:2 - devtmpfs udev rw\n\
                  570 562 0:80 / / rw - overlay overlay rw\n";
    let card = Path::new("/dev/dri/card1");
    assert_eq!(mounted_as(host, card), Some("devtmpfs"));
    assert_eq!(mounted_as(docker, card), Some("devtmpfs"));
    assert_eq!(mounted_as(docker, Path::new("/dev/rknpu")), Some("tmpfs"));
    assert_eq!(mounted_as("", card), None);
}

#[test]
fn without_a_folder_for_the_lock_there_is_one_clear_line() {
    let _turn = turn();
    let folder = folder("none");
    let nowhere = folder.join("nowhere");
    let text =
        refusal(lock_file(std::slice::from_ref(&nowhere)).and_then(|node| Seat::of(vec![node])));
    assert!(
        text.contains("nowhere") && text.contains("No such file"),
        "{text}"
    );
    // If the first folder does not exist, the next one is used.
    lock_file(&[nowhere, folder.clone()]).unwrap();
    // Neither a symbolic link nor a FIFO is followed.
    fs::remove_file(folder.join(FILE)).unwrap();
    std::os::unix::fs::symlink(folder.join("target"), folder.join(FILE)).unwrap();
    lock_file(std::slice::from_ref(&folder)).unwrap_err();
    assert!(!folder.join("target").exists());
    fs::remove_dir_all(folder).unwrap();
}
