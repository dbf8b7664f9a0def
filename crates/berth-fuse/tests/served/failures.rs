//! Servers that freeze, die and come back, and callers that are killed meanwhile.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead as _, BufReader, ErrorKind, Read as _, Write as _},
    os::unix::fs::{FileExt as _, symlink},
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::{
    fs::{CWD, FileType, Mode, RenameFlags},
    io::Errno,
    process::{Pid, Signal, kill_process},
};

use crate::{
    between::{Asked, Fate, between},
    world::{PATIENCE, Server, command, until},
};

#[test]
fn a_soft_mount_gives_up_on_a_server_that_is_silent() {
    for (version, option, errno) in [("3", "soft", Errno::IO), ("4.1", "softerr", Errno::TIMEDOUT)] {
        let mut server = Server::start(&[]);
        fs::write(server.export().join("file"), "content").unwrap();
        let mounted = server.mount(version, &format!("{option},timeo=20,retrans=1"));
        server.send("stop");
        let begun = Instant::now();
        let error = fs::write(mounted.path("other"), "").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(errno.raw_os_error()), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        server.send("cont");
        until("the server is back", || {
            fs::read_to_string(mounted.path("file")).is_ok_and(|text| text == "content")
        });
    }
}

#[test]
fn whoever_waits_for_a_silent_server_can_be_killed_and_by_nothing_less() {
    let mut server = Server::start(&[]);
    let mounted = server.mount("4.1", "hard,timeo=10");
    let path = mounted.path("file");
    fs::write(&path, "content").unwrap();
    server.send("stop");
    // Ignores a signal, says so, and asks the server.
    let script = r#"trap 'echo caught' USR1; echo begun; read -r line <"$0"; echo "$line""#;
    let mut reader = command("bash").args(["-c", script]).arg(&path).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(reader.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "begun\n");
    let pid = Pid::from_child(&reader);
    kill_process(pid, Signal::USR1).unwrap();
    server.send("cont");
    line.clear();
    output.read_to_string(&mut line).unwrap();
    // The signal has neither ended the wait nor been lost.
    assert!(line.contains("content") && line.contains("caught"), "{line}");
    assert!(reader.wait().unwrap().success());

    server.send("stop");
    let mut reader = command("cat").arg(&path).stdout(Stdio::null()).spawn().unwrap();
    let begun = Instant::now();
    let pid = Pid::from_child(&reader);
    kill_process(pid, Signal::USR2).unwrap();
    reader.kill().unwrap();
    reader.wait().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    server.send("cont");
    assert_eq!(fs::read_to_string(&path).unwrap(), "content");
}

#[test]
fn what_was_written_survives_a_server_that_dies_before_it_is_on_disk() {
    for version in ["3", "4.0", "4.1", "4.2"] {
        let mut server = Server::start(&[]);
        let mounted = server.mount(version, "hard");
        let mut file = OpenOptions::new().write(true).create_new(true).open(mounted.path("file")).unwrap();
        file.write_all(&vec![b'a'; 300_000]).unwrap();
        server.send("kill");
        // As if the server had lost what was in its memory.
        OpenOptions::new().write(true).open(server.export().join("file")).unwrap().set_len(0).unwrap();
        server.send("start");
        file.write_all_at(&vec![b'b'; 100_000], 300_000).unwrap();
        file.sync_all().unwrap();
        let there = fs::read(server.export().join("file")).unwrap();
        let expected = [vec![b'a'; 300_000], vec![b'b'; 100_000]].concat();
        assert!(there == expected, "version {version}: {} bytes are there", there.len());
    }
}

#[test]
fn a_hard_mount_waits_for_a_server_that_comes_back() {
    for version in ["3", "4.1"] {
        let mut server = Server::start(&[]);
        let mounted = server.mount(version, "hard,timeo=10");
        fs::create_dir(mounted.path("dir")).unwrap();
        server.send("kill");
        let dir = mounted.path("dir");
        let writing = std::thread::spawn(move || {
            for number in 0..20 {
                fs::write(dir.join(format!("file {number}")), vec![b'x'; 10_000]).unwrap();
            }
        });
        server.send("start");
        let deadline = Instant::now() + PATIENCE;
        while !writing.is_finished() {
            assert!(Instant::now() < deadline, "it hangs");
            std::thread::sleep(Duration::from_millis(10));
        }
        writing.join().unwrap();
        assert_eq!(fs::read_dir(server.export().join("dir")).unwrap().count(), 20);
    }
}

#[test]
fn a_share_that_is_not_there_is_an_error_and_no_mount() {
    let server = Server::start(&[]);
    let at = tempfile::tempdir().unwrap();
    let mount = |options: &str| berth_fuse::Mount {
        server: "127.0.0.1".to_owned(),
        path: "/nowhere".to_owned(),
        options: vec![options.to_owned()],
        at: at.path().to_owned(),
    };
    let port = server.port();
    for (options, said) in [
        (format!("vers=4.1,port={port}"), "there is no such file or directory"),
        ("sec=krb5".to_owned(), "only sec=sys is spoken"),
        ("soft,timeo=never".to_owned(), "timeo=never is no number that makes sense there"),
        ("vers=4.1,port=1".to_owned(), "cannot connect"),
    ] {
        let error = berth_fuse::serve(&mount(&options), || panic!("it is not ready")).unwrap_err();
        let chain = format!("{error}: {:?}", std::error::Error::source(&error).map(ToString::to_string));
        assert!(chain.contains(said), "{options}: {chain}");
        assert!(!berth_host::remote::is_mounted(at.path()).unwrap());
    }
    assert_eq!(fs::read_dir(at.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
}

type Deed = Box<dyn FnOnce() + Send>;

#[test]
fn what_a_call_made_before_its_connection_broke_is_not_in_its_own_way() {
    for version in ["3", "4.0", "4.1"] {
        let server = Server::start(&[]);
        let is_to_break = Arc::new(AtomicBool::new(false));
        // What somebody else does just before the server hears of it.
        let other: Arc<Mutex<Option<Deed>>> = Arc::default();
        let (breaks, others) = (is_to_break.clone(), other.clone());
        let port = between(server.port(), move |request| {
            let is_making = matches!(request.asked(), Asked::Create | Asked::Make | Asked::Link);
            if !is_making || !breaks.swap(false, Ordering::SeqCst) {
                return Fate::Passed;
            }
            if let Some(other) = others.lock().take() {
                other();
            }
            Fate::Cut
        });
        let mounted = server.mount(version, &format!("hard,port={}", port.unwrap()));
        let made = |made: &dyn Fn() -> io::Result<()>| {
            is_to_break.store(true, Ordering::SeqCst);
            let made = made();
            assert!(!is_to_break.load(Ordering::SeqCst), "version {version}: the connection did not break");
            made
        };
        let fifo = |name: &str| {
            let private = Mode::from_raw_mode(0o600);
            rustix::fs::mknodat(CWD, mounted.path(name), FileType::Fifo, private, 0).map_err(Into::into)
        };
        let moved = |from: &str, to: &str| {
            let (from, to) = (mounted.path(from), mounted.path(to));
            rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE).map_err(Into::into)
        };
        made(&|| fs::create_dir(mounted.path("dir"))).unwrap();
        made(&|| symlink("dir", mounted.path("link"))).unwrap();
        made(&|| File::create_new(mounted.path("file")).map(drop)).unwrap();
        made(&|| fifo("fifo")).unwrap();
        made(&|| moved("file", "moved")).unwrap();
        assert!(server.export().join("moved").is_file() && !server.export().join("file").exists());

        // What is another's is still in the way.
        let export = server.export();
        *other.lock() = Some(Box::new({
            let path = export.join("other link");
            move || symlink("elsewhere", path).unwrap()
        }));
        let taken = made(&|| symlink("dir", mounted.path("other link"))).unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::AlreadyExists);
        for name in ["other file", "other dir"] {
            let path = export.join(name);
            *other.lock() = Some(Box::new(move || fs::write(path, "content").unwrap()));
            let taken = made(&|| match name {
                "other dir" => fs::create_dir(mounted.path(name)),
                _ => File::create_new(mounted.path(name)).map(drop),
            });
            assert_eq!(taken.unwrap_err().kind(), ErrorKind::AlreadyExists, "version {version}: {name}");
        }
    }
}
