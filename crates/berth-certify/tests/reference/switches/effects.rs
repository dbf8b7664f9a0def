//! Data, statistics, crashes, leaks, and what a single call leaves on the machine.

use super::*;

/// Watches the calls that publish a volume: its id and the target, after the driver answered OK.
fn on_publish(check: &'static str, seen: impl Fn(&Reference, &str, &Path) + Send + Sync + 'static) -> Switch {
    alter(check, move |reference, r: &NodePublishVolumeRequest, _| {
        seen(reference, &r.volume_id, Path::new(&r.target_path));
    })
}

pub(super) fn data() -> Vec<Switch> {
    let unpublish = |reference: &Reference, method: &str, message: &[u8]| match method {
        "NodeUnpublishVolume" => {
            let target = NodeUnpublishVolumeRequest::decode(message).unwrap().target_path;
            let target = Path::new(&target);
            let _ = fs::rename(target.join("data"), target.join(".hidden"));
        }
        "NodeStageVolume" => {
            let id = NodeStageVolumeRequest::decode(message).unwrap().volume_id;
            reference.note(format!("fresh {id}"));
        }
        _ => {}
    };
    let unpublishing: Run = Box::new(move |reference, path, method, message| {
        Box::pin(async move {
            unpublish(reference, &method, &message);
            let answer = reference.inner(&path, message.clone()).await;
            if method == "NodePublishVolume" && answer.is_ok() {
                let request = NodePublishVolumeRequest::decode(message).unwrap();
                let target = Path::new(&request.target_path);
                if reference.forget(&format!("fresh {}", request.volume_id)) {
                    let _ = fs::rename(target.join(".hidden"), target.join("data"));
                }
            }
            answer
        })
    });
    vec![
        watch("data.empty", |reference, method, message, answer| {
            if let ("CreateVolume", Ok(created)) = (method, &answer) {
                let name = CreateVolumeRequest::decode(message).unwrap().name;
                let id = CreateVolumeResponse::decode(created.clone()).unwrap().volume.unwrap().volume_id;
                if reference.note(format!("name {name}")) {
                    reference.note(format!("first {id}"));
                } else {
                    reference.forget(&format!("first {id}"));
                }
            }
            if let ("NodePublishVolume", Ok(_)) = (method, &answer) {
                let request = NodePublishVolumeRequest::decode(message).unwrap();
                if reference.forget(&format!("first {}", request.volume_id)) {
                    let _ = fs::write(Path::new(&request.target_path).join("foreign"), "x");
                }
            }
            answer
        }),
        watch("data.deleted", |reference, method, message, answer| {
            if let ("CreateVolume", Ok(created)) = (method, &answer) {
                let name = CreateVolumeRequest::decode(message).unwrap().name;
                let id = CreateVolumeResponse::decode(created.clone()).unwrap().volume.unwrap().volume_id;
                if !reference.note(format!("name {name}")) {
                    reference.note(format!("again {id}"));
                }
            }
            if let ("NodePublishVolume", Ok(_)) = (method, &answer) {
                let request = NodePublishVolumeRequest::decode(message).unwrap();
                if reference.forget(&format!("again {}", request.volume_id)) {
                    let _ = fs::write(Path::new(&request.target_path).join("data"), "x");
                }
            }
            answer
        }),
        Switch { check: "data.unpublish", run: unpublishing },
        watch("data.restage", |reference, method, message, answer| {
            if let ("NodeUnstageVolume", Ok(_)) = (method, &answer) {
                reference.note(format!(
                    "unstaged {}",
                    NodeUnstageVolumeRequest::decode(message).unwrap().volume_id
                ));
            }
            if let ("NodePublishVolume", Ok(_)) = (method, &answer) {
                let request = NodePublishVolumeRequest::decode(message).unwrap();
                if reference.knows(&format!("unstaged {}", request.volume_id)) {
                    let _ = fs::remove_file(Path::new(&request.target_path).join("data"));
                }
            }
            answer
        }),
        on_publish("data.restart", |reference, id, target| {
            if reference.noted_in_an_earlier_life(&format!("published {id}")) {
                let _ = fs::remove_file(target.join("data"));
            }
        }),
        switch(
            "call.read-only",
            |_, _: &mut NodePublishVolumeRequest| None,
            |_, r, answer| {
                if r.readonly && answer.is_ok() {
                    let flags = rustix::mount::MountFlags::BIND;
                    rustix::mount::mount_remount(r.target_path.as_str(), flags, "").unwrap();
                }
                answer
            },
        ),
        watch("data.clone", |reference, method, message, answer| {
            if let ("CreateVolume", Ok(created)) = (method, &answer)
                && source_volume(&CreateVolumeRequest::decode(message).unwrap()).is_some()
            {
                let id = CreateVolumeResponse::decode(created.clone()).unwrap().volume.unwrap().volume_id;
                reference.note(format!("clone {id}"));
            }
            if let ("NodePublishVolume", Ok(_)) = (method, &answer) {
                let request = NodePublishVolumeRequest::decode(message).unwrap();
                if reference.forget(&format!("clone {}", request.volume_id)) {
                    let _ = fs::write(Path::new(&request.target_path).join("data"), "x".repeat(64));
                }
            }
            answer
        }),
        watch("data.restored-apart", |reference, method, message, answer| {
            if let ("CreateVolume", Ok(created)) = (method, &answer)
                && let Some(snapshot) = source_snapshot(&CreateVolumeRequest::decode(message).unwrap())
                && !reference.note(format!("restored {snapshot}"))
            {
                let id = CreateVolumeResponse::decode(created.clone()).unwrap().volume.unwrap().volume_id;
                reference.note(format!("second {id}"));
            }
            if let ("NodePublishVolume", Ok(_)) = (method, &answer) {
                let request = NodePublishVolumeRequest::decode(message).unwrap();
                if reference.forget(&format!("second {}", request.volume_id)) {
                    let _ = fs::write(Path::new(&request.target_path).join("data"), "x".repeat(64));
                }
            }
            answer
        }),
        watch("data.snapshot-outlives", |reference, method, message, answer| {
            match (method, &answer) {
                ("CreateSnapshot", Ok(made)) => {
                    let snapshot = CreateSnapshotResponse::decode(made.clone()).unwrap().snapshot.unwrap();
                    reference.note(format!("{} of {}", snapshot.snapshot_id, snapshot.source_volume_id));
                }
                ("DeleteVolume", Ok(_)) => {
                    reference
                        .note(format!("deleted {}", DeleteVolumeRequest::decode(message).unwrap().volume_id));
                }
                ("CreateVolume", Ok(_)) => {
                    if let Some(snapshot) = source_snapshot(&CreateVolumeRequest::decode(message).unwrap()) {
                        let memory = reference.memory.lock();
                        let mut facts = memory.facts.iter();
                        let source = facts.find_map(|fact| fact.strip_prefix(&format!("{snapshot} of ")));
                        if source.is_some_and(|source| memory.facts.contains(&format!("deleted {source}"))) {
                            return Err(Status::not_found("the snapshot went with its volume"));
                        }
                    }
                }
                _ => {}
            }
            answer
        }),
        alter("stats.total", |_, _: &NodeGetVolumeStatsRequest, answer| {
            answer.usage.iter_mut().for_each(|usage| usage.total = usage.total.saturating_mul(3));
        }),
        alter("stats.move", |_, _: &NodeGetVolumeStatsRequest, answer| {
            answer.usage.iter_mut().for_each(|usage| usage.used = 4096);
        }),
    ]
}

/// Runs a program that ends by itself; nobody waits for it before this time.
fn run_program(words: &[&str], pause: Duration) {
    let log = std::env::temp_dir().join("berth-reference.log");
    let mut child = berth_host::exec::detach(Path::new("/bin/sh"), words, &log).unwrap();
    std::thread::spawn(move || {
        std::thread::sleep(pause);
        child.wait()
    });
}

pub(super) fn crashes_and_leaks() -> Vec<Switch> {
    vec![
        forgets("crash.create", |r: &CreateVolumeRequest| r.name.clone()),
        forgets("crash.delete", |r: &DeleteVolumeRequest| r.volume_id.clone()),
        forgets("crash.attach", |r: &ControllerPublishVolumeRequest| r.volume_id.clone()),
        forgets("crash.stage", |r: &NodeStageVolumeRequest| r.volume_id.clone()),
        forgets("crash.snapshot", |r: &CreateSnapshotRequest| r.name.clone()),
        forgets("crash.expand", |r: &ControllerExpandVolumeRequest| r.volume_id.clone()),
        forgets("crash.publish", |r: &NodePublishVolumeRequest| r.target_path.clone()),
        watch("crash.list", |reference, method, _, answer| match (method, answer) {
            ("CreateVolume", Ok(made)) => {
                let id = CreateVolumeResponse::decode(made.clone()).unwrap().volume.unwrap().volume_id;
                reference.note(format!("created {id}"));
                Ok(made)
            }
            ("ListVolumes", Ok(list)) => {
                let mut list = ListVolumesResponse::decode(list).unwrap();
                let is_known = |id: &str| reference.knows(&format!("created {id}"));
                list.entries.retain(|entry| is_known(&entry.volume.as_ref().unwrap().volume_id));
                Ok(encoded(&list))
            }
            (_, answer) => answer,
        }),
        on_publish("leak.mounts", |reference, _, target| {
            if reference.count("NodePublishVolume") == 1 {
                let other = target.with_file_name("target-leaked");
                let _ = fs::create_dir(&other);
                rustix::mount::mount_bind(target, &other).unwrap();
            }
        }),
        on_publish("leak.directories", |_, _, target| {
            let _ = fs::write(target.with_file_name("left-by-the-driver"), "x");
        }),
        on_publish("leak.files", |_, _, _| std::mem::forget(fs::File::open("/dev/null").unwrap())),
        on_publish("leak.children", |_, _, _| run_program(&["-c", "sleep 30"], Duration::from_secs(120))),
        alter("secret.log", |_, r: &CreateVolumeRequest, _| println!("{:?}", r.secrets)),
        alter("secret.command-line", |_, r: &NodeStageVolumeRequest, _| {
            let secret = r.secrets.values().next().cloned().unwrap_or_default();
            run_program(&["-c", "sleep 0.3; true", &secret], Duration::ZERO);
        }),
    ]
}

pub(super) fn one_call() -> Vec<Switch> {
    let no_id = |r: &DeleteVolumeRequest| r.volume_id.is_empty();
    let hang: Run = Box::new(|reference, path, method, message| {
        Box::pin(async move {
            if method == "NodeGetStorageHealth" {
                std::future::pending::<()>().await;
            }
            reference.inner(&path, message).await
        })
    });
    // What it adds to an answer it takes out of the requests that bring it back.
    let large: Run = Box::new(|reference, path, method, message| {
        Box::pin(async move {
            let message = match method.as_str() {
                "NodeStageVolume" => {
                    let mut request = NodeStageVolumeRequest::decode(message).unwrap();
                    request.publish_context.remove("large");
                    encoded(&request)
                }
                "NodePublishVolume" => {
                    let mut request = NodePublishVolumeRequest::decode(message).unwrap();
                    request.publish_context.remove("large");
                    encoded(&request)
                }
                _ => message,
            };
            let answer = reference.inner(&path, message).await?;
            if method != "ControllerPublishVolume" {
                return Ok(answer);
            }
            let mut answer = ControllerPublishVolumeResponse::decode(answer).unwrap();
            answer.publish_context.insert("large".to_owned(), "x".repeat(5000));
            Ok(encoded(&answer))
        })
    });
    vec![
        Switch { check: "call.answers", run: hang },
        switch(
            "call.message",
            move |_, r: &mut DeleteVolumeRequest| no_id(r).then(|| Err(Status::invalid_argument(""))),
            |_, _, answer| answer,
        ),
        switch(
            "call.details",
            move |_, r: &mut DeleteVolumeRequest| {
                let details = Bytes::from_static(b"details");
                no_id(r).then(|| {
                    Err(Status::with_details(Code::InvalidArgument, "volume_id is missing", details))
                })
            },
            |_, _, answer| answer,
        ),
        switch(
            "call.secret-in-error",
            move |_, r: &mut DeleteVolumeRequest| {
                let secrets: Vec<_> = r.secrets.values().cloned().collect();
                no_id(r)
                    .then(|| Err(Status::invalid_argument(format!("volume_id is missing in {secrets:?}"))))
            },
            |_, _, answer| answer,
        ),
        alter("call.secret-in-answer", |_, r: &ControllerPublishVolumeRequest, answer| {
            answer
                .publish_context
                .insert("secret".to_owned(), r.secrets.values().next().cloned().unwrap_or_default());
        }),
        Switch { check: "call.limits", run: large },
        alter("call.capacity", |_, _: &CreateVolumeRequest, answer| {
            answer.volume.as_mut().unwrap().capacity_bytes = 1;
        }),
        alter("call.content-source", |_, _: &CreateVolumeRequest, answer| {
            answer.volume.as_mut().unwrap().content_source = None;
        }),
        alter("call.snapshot", |_, _: &CreateSnapshotRequest, answer| {
            answer.snapshot.as_mut().unwrap().creation_time = None;
        }),
        alter("call.expanded", |_, r: &ControllerExpandVolumeRequest, answer| {
            if required(r.capacity_range.as_ref()) == DOUBLE {
                answer.capacity_bytes = 1;
            }
        }),
        alter("call.target-removed", |_, r: &NodeUnpublishVolumeRequest, _| {
            let _ = fs::create_dir(&r.target_path);
        }),
        alter("call.usage", |_, _: &NodeGetVolumeStatsRequest, answer| {
            answer.usage.iter_mut().for_each(|usage| usage.available = -1);
        }),
        alter("call.entries", |_, r: &ListVolumesRequest, answer| {
            if r.max_entries == 0 && !answer.entries.is_empty() {
                answer.entries.push(answer.entries[0].clone());
            }
        }),
        alter("call.node-id", |_, _: &NodeGetInfoRequest, answer| answer.max_volumes_per_node = -1),
    ]
}
