//! Who may do what is the server's decision about the calling process.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown},
};

use crate::world::{Mounted, Server, command};

/// Runs a shell as this user; returns whether it succeeded.
fn shell(mounted: &Mounted, user: u32, groups: &str, script: &str) -> bool {
    let user = user.to_string();
    let groups = if groups.is_empty() { "--clear-groups".to_owned() } else { format!("--groups={groups}") };
    let output = command("setpriv")
        .args(["--reuid", &user, "--regid", &user, &groups, "sh", "-c", script])
        .current_dir(mounted.path(""))
        .output()
        .unwrap();
    output.status.success()
}

#[test]
fn each_process_has_its_own_rights() {
    for (server, version) in [(Server::start(&[]), "3"), (Server::start(&[]), "4.1"), (Server::own(), "3")] {
        let mounted = server.mount(version, "");
        fs::set_permissions(server.export(), Permissions::from_mode(0o755)).unwrap();
        for (name, mode, owner, group) in
            [("own", 0o700, 2001, 2001), ("shared", 0o2770, 0, 3001), ("public", 0o1777, 0, 0)]
        {
            let dir = server.export().join(name);
            fs::create_dir_all(&dir).unwrap();
            chown(&dir, Some(owner), Some(group)).unwrap();
            fs::set_permissions(&dir, Permissions::from_mode(mode)).unwrap();
        }
        let run = |user, groups: &str, script: &str| shell(&mounted, user, groups, script);
        assert!(run(2001, "", "echo secret >own/file && chmod 600 own/file && cat own/file"));
        assert_eq!(fs::metadata(server.export().join("own/file")).unwrap().uid(), 2001);
        // What one user has just looked at says nothing about another.
        assert!(!run(2002, "", "cat own/file"));
        assert!(!run(2002, "", "cd own"));
        assert!(!run(2002, "", "ls own"));
        assert!(!run(2002, "", "test -x own"));
        assert!(!run(2002, "", "echo x >shared/file"));
        assert!(run(2002, "3001", "echo x >shared/file"));
        let shared = fs::metadata(server.export().join("shared/file")).unwrap();
        assert_eq!((shared.uid(), shared.gid()), (2002, 3001));
        assert!(run(2002, "", "echo x >public/mine && chmod 640 public/mine"));
        assert!(!run(2001, "", "cat public/mine"));
        assert!(!run(2001, "", "echo y >>public/mine"));
        assert!(!run(2001, "", "rm -f public/mine"));
        assert!(!run(2001, "", "chown 2001 public/mine"));
        assert!(run(2002, "", "rm public/mine"));
        fs::remove_dir_all(server.export().join("own")).unwrap();
        fs::remove_dir_all(server.export().join("shared")).unwrap();
    }
}

#[test]
fn a_server_that_makes_everybody_one_user_is_heeded() {
    let server = Server::start(&["squash=All"]);
    fs::set_permissions(server.export(), Permissions::from_mode(0o777)).unwrap();
    let mounted = server.mount("3", "");
    assert!(shell(&mounted, 2001, "", "umask 077 && echo x >file"));
    // The file is somebody else's now, by its attributes, and yet the same user's by the server's account.
    assert!(shell(&mounted, 2002, "", "cat file && echo y >>file"));
    assert_ne!(fs::metadata(mounted.path("file")).unwrap().uid(), 2001);
}

#[test]
fn a_new_directory_inherits_setgid_and_group() {
    let ganesha = ["3", "4.0", "4.1", "4.2"].map(|version| (Server::start(&[]), version));
    for (server, version) in ganesha.into_iter().chain([(Server::own(), "3")]) {
        let mounted = server.mount(version, "");
        // As the kubelet prepares a volume for a pod with an fsGroup.
        let top = mounted.path("volume");
        fs::create_dir(&top).unwrap();
        chown(&top, None, Some(3001)).unwrap();
        fs::set_permissions(&top, Permissions::from_mode(0o2777)).unwrap();
        assert!(shell(&mounted, 2001, "", "umask 022 && mkdir -p volume/a/b && echo x >volume/a/b/file"));
        for (name, mode) in [("a", 0o2755), ("a/b", 0o2755), ("a/b/file", 0o644)] {
            for of in [top.join(name), server.export().join("volume").join(name)] {
                let is = fs::metadata(&of).unwrap();
                assert_eq!(
                    (is.mode() & 0o7777, is.gid()),
                    (mode, 3001),
                    "version {version}: {}",
                    of.display()
                );
            }
        }
        // What is asked for by name is done.
        assert!(shell(&mounted, 2001, "3001", "chmod g-s volume/a && mkdir volume/a/c"));
        assert_eq!(fs::metadata(top.join("a")).unwrap().mode() & 0o7777, 0o755, "version {version}");
        assert_eq!(fs::metadata(top.join("a/c")).unwrap().mode() & 0o7777, 0o755, "version {version}");
        fs::remove_dir_all(&top).unwrap();
    }
}
