//! DigitalOcean's API: volumes, actions, snapshots, limits, faults and restarts.

use std::fs::{self, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::Duration;

use berth_cloud::Provider;
use serde_json::{Value, json};

use crate::client::{Answer, Directory, Running, eventually, options};

const GIB: u64 = 1 << 30;

fn start(directory: &Directory) -> Running {
    Running::start(all(directory))
}

fn all(directory: &Directory) -> berth_cloud::Options {
    let provider = Provider::DigitalOcean { token: "secret".to_owned() };
    options(provider, "nyc3", &["1", "2"], &directory.path())
}

fn call(twin: &Running, method: &str, path: &str, body: &Value) -> Answer {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    twin.send(method, path, "authorization: Bearer secret\r\n", &body).expect("there is an answer")
}

fn get(twin: &Running, path: &str) -> Value {
    let answer = call(twin, "GET", path, &Value::Null);
    assert_eq!(answer.status, 200, "{path}: {}", answer.text);
    answer.json()
}

fn create(twin: &Running, name: &str, gib: u64) -> String {
    let body = json!({"region": "nyc3", "name": name, "description": "d", "size_gigabytes": gib, "snapshot_id": "",
        "filesystem_type": "", "filesystem_label": "", "tags": null});
    let answer = call(twin, "POST", "/v2/volumes", &body);
    assert_eq!(answer.status, 201, "{}", answer.text);
    answer.json()["volume"]["id"].as_str().unwrap().to_owned()
}

fn act(twin: &Running, volume: &str, body: &Value) -> Answer {
    call(twin, "POST", &format!("/v2/volumes/{volume}/actions"), body)
}

/// Starts an action, waits for its end, and gives its last status.
fn done(twin: &Running, volume: &str, body: &Value) -> String {
    let answer = act(twin, volume, body);
    assert_eq!(answer.status, 202, "{}", answer.text);
    let id = answer.json()["action"]["id"].as_u64().unwrap();
    eventually("the action ends", || {
        let action = get(twin, &format!("/v2/volumes/{volume}/actions/{id}"));
        let status = action["action"]["status"].as_str().unwrap().to_owned();
        (status != "in-progress").then_some(status)
    })
}

fn link(twin: &Running, droplet: &str, name: &str) -> PathBuf {
    twin.twin.devices_of(droplet).join(format!("scsi-0DO_Volume_{name}"))
}

fn device_size(path: &PathBuf) -> u64 {
    fs::File::open(path).unwrap().seek(SeekFrom::End(0)).unwrap()
}

#[test]
fn a_volume_is_attached_as_a_device_grows_and_is_detached() {
    let directory = Directory::new();
    let twin = start(&directory);
    let id = create(&twin, "data", 1);
    assert_eq!(done(&twin, &id, &json!({"type": "attach", "droplet_id": 1})), "completed");
    let path = link(&twin, "1", "data");
    assert_eq!(device_size(&path), GIB);
    assert_eq!(get(&twin, &format!("/v2/volumes/{id}"))["volume"]["droplet_ids"], json!([1]));
    assert_eq!(get(&twin, "/v2/droplets/1")["droplet"]["volume_ids"], json!([id]));

    let mut device = OpenOptions::new().write(true).open(&path).unwrap();
    device.write_all(b"written").unwrap();
    device.sync_all().unwrap();
    drop(device);
    assert_eq!(
        done(&twin, &id, &json!({"type": "resize", "size_gigabytes": 2, "region": "nyc3"})),
        "completed"
    );
    assert_eq!(device_size(&path), 2 * GIB);

    let refused = call(&twin, "DELETE", &format!("/v2/volumes/{id}"), &Value::Null);
    assert_eq!((refused.status, refused.json()["id"].as_str()), (409, Some("conflict")));
    let refused = act(&twin, &id, &json!({"type": "attach", "droplet_id": 2}));
    assert!(refused.status == 422 && refused.text.contains("This volume is already attached"));
    assert_eq!(done(&twin, &id, &json!({"type": "detach", "droplet_id": 1})), "completed");
    assert!(fs::symlink_metadata(&path).is_err());
    let refused = act(&twin, &id, &json!({"type": "detach", "droplet_id": 1}));
    assert!(refused.status == 422 && refused.text.contains("Attachment not found"), "{}", refused.text);

    // On another droplet, with what was written.
    assert_eq!(done(&twin, &id, &json!({"type": "attach", "droplet_id": 2})), "completed");
    let mut written = [0; 7];
    fs::File::open(link(&twin, "2", "data")).unwrap().read_exact(&mut written).unwrap();
    assert_eq!(&written, b"written");
    assert_eq!(done(&twin, &id, &json!({"type": "detach", "droplet_id": 2})), "completed");
    assert_eq!(call(&twin, "DELETE", &format!("/v2/volumes/{id}"), &Value::Null).status, 204);
    assert_eq!(call(&twin, "GET", &format!("/v2/volumes/{id}"), &Value::Null).status, 404);
}

#[test]
fn a_snapshot_holds_the_bytes_and_makes_a_volume_of_its_size() {
    let directory = Directory::new();
    let twin = start(&directory);
    let id = create(&twin, "source", 1);
    done(&twin, &id, &json!({"type": "attach", "droplet_id": 1}));
    let mut device = OpenOptions::new().write(true).open(link(&twin, "1", "source")).unwrap();
    device.write_all(b"first").unwrap();
    device.sync_all().unwrap();
    let taken = call(&twin, "POST", &format!("/v2/volumes/{id}/snapshots"), &json!({"name": "snap"}));
    assert_eq!(taken.status, 201, "{}", taken.text);
    let snapshot = taken.json()["snapshot"]["id"].as_str().unwrap().to_owned();
    let again = call(&twin, "POST", &format!("/v2/volumes/{id}/snapshots"), &json!({"name": "snap"}));
    assert_eq!(again.status, 409);
    device.seek(SeekFrom::Start(0)).unwrap();
    device.write_all(b"later").unwrap();
    device.sync_all().unwrap();
    drop(device);
    let listed = get(&twin, &format!("/v2/volumes/{id}/snapshots?page=1&per_page=50"));
    assert_eq!(listed["snapshots"][0]["min_disk_size"], json!(1));

    let body = json!({"name": "restored", "region": "nyc3", "size_gigabytes": 5, "snapshot_id": snapshot});
    let restored = call(&twin, "POST", "/v2/volumes", &body).json()["volume"].clone();
    assert_eq!(restored["size_gigabytes"], json!(1), "the size of the snapshot, whatever is asked for");
    done(&twin, restored["id"].as_str().unwrap(), &json!({"type": "attach", "droplet_id": 2}));
    let mut bytes = [0; 5];
    fs::File::open(link(&twin, "2", "restored")).unwrap().read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"first");
    assert_eq!(call(&twin, "DELETE", &format!("/v2/snapshots/{snapshot}"), &Value::Null).status, 204);
    assert_eq!(get(&twin, "/v2/snapshots?resource_type=volume")["snapshots"], json!([]));
}

#[test]
fn bad_requests_have_the_status_and_the_text_of_the_cloud() {
    let directory = Directory::new();
    let mut options = all(&directory);
    options.quotas.capacity_gib = 100;
    options.quotas.disks_per_instance = 1;
    let twin = Running::start(options);
    assert_eq!(twin.send("GET", "/v2/volumes", "authorization: Bearer wrong\r\n", "").unwrap().status, 401);
    assert_eq!(call(&twin, "GET", "/v2/nothing", &Value::Null).status, 404);
    let post = |body: Value| call(&twin, "POST", "/v2/volumes", &body);
    let volume = |name: &str, gib: u64| json!({"name": name, "region": "nyc3", "size_gigabytes": gib});
    for (body, status, text) in [
        (volume("Upper", 1), 422, "lowercase"),
        (volume(&"a".repeat(65), 1), 422, "64"),
        (volume("zero", 0), 422, "between 1 and 16384"),
        (json!({"name": "no-region", "size_gigabytes": 1}), 422, "Region"),
        (json!({"name": "far", "region": "ams3", "size_gigabytes": 1}), 422, "ams3"),
        (json!({"name": "of", "region": "nyc3", "snapshot_id": "none"}), 404, "not_found"),
        (volume("large", 101), 403, "capacity limit exceeded"),
        (json!(["x"]), 400, "Invalid request body"),
    ] {
        let answer = post(body);
        assert!(answer.status == status && answer.text.contains(text), "{} {}", answer.status, answer.text);
    }
    let first = create(&twin, "first", 1);
    assert_eq!(post(volume("first", 1)).status, 409);
    let second = create(&twin, "second", 1);
    assert_eq!(done(&twin, &first, &json!({"type": "attach", "droplet_id": 1})), "completed");
    let full = act(&twin, &second, &json!({"type": "attach", "droplet_id": 1}));
    assert!(full.status == 422 && full.text.contains("cannot attach more volumes to the Droplet"));
    assert_eq!(act(&twin, &second, &json!({"type": "attach", "droplet_id": 9})).status, 404);
    let small = act(&twin, &second, &json!({"type": "resize", "size_gigabytes": 1}));
    assert!(small.status == 422 && small.text.contains("greater than the current size"), "{}", small.text);
}

#[test]
fn lists_have_pages_and_new_volumes_may_be_listed_late() {
    let directory = Directory::new();
    let twin = start(&directory);
    for number in 0..5 {
        create(&twin, &format!("volume-{number}"), 1);
    }
    let mut names = Vec::new();
    let mut path = "/v2/volumes?region=nyc3&page=1&per_page=2".to_owned();
    loop {
        let list = get(&twin, &path);
        assert_eq!(list["meta"]["total"], json!(5));
        names.extend(list["volumes"].as_array().unwrap().iter().map(|volume| volume["name"].clone()));
        let Some(next) = list["links"]["pages"]["next"].as_str() else { break };
        path = next.strip_prefix(twin.twin.url()).unwrap().to_owned();
    }
    assert_eq!(names.len(), 5);
    assert_eq!(get(&twin, "/v2/volumes?name=volume-3&region=nyc3")["meta"]["total"], json!(1));
    twin.admin("PUT", "delays", r#"{"listed":"1h"}"#);
    let id = create(&twin, "late", 1);
    assert_eq!(get(&twin, "/v2/volumes?name=late&region=nyc3")["meta"]["total"], json!(0));
    assert_eq!(get(&twin, &format!("/v2/volumes/{id}"))["volume"]["name"], json!("late"));
}

#[test]
fn a_droplet_takes_one_action_at_a_time() {
    let directory = Directory::new();
    let twin = start(&directory);
    let (first, second) = (create(&twin, "first", 1), create(&twin, "second", 1));
    twin.admin("PUT", "delays", r#"{"attach":"1h"}"#);
    assert_eq!(act(&twin, &first, &json!({"type": "attach", "droplet_id": 1})).status, 202);
    twin.admin("PUT", "delays", r#"{"attach":"10ms"}"#);
    let busy = act(&twin, &second, &json!({"type": "attach", "droplet_id": 1}));
    assert!(busy.status == 422 && busy.text.contains("Droplet already has a pending event"), "{}", busy.text);
    assert_eq!(done(&twin, &second, &json!({"type": "attach", "droplet_id": 2})), "completed");
    done(&twin, &second, &json!({"type": "detach", "droplet_id": 2}));
}

#[test]
fn faults_happen_as_asked_for_and_calls_are_counted() {
    let directory = Directory::new();
    let twin = start(&directory);
    twin.admin("DELETE", "calls", "");
    twin.admin(
        "POST",
        "faults",
        "volumes.create=after:503\nvolumes.create=drop-after,after=1\naccount.get=throttle",
    );
    let body = |name: &str| json!({"name": name, "region": "nyc3", "size_gigabytes": 1});
    assert_eq!(call(&twin, "POST", "/v2/volumes", &body("one")).status, 503);
    let dropped =
        twin.send("POST", "/v2/volumes", "authorization: Bearer secret\r\n", &body("two").to_string());
    assert!(dropped.is_none(), "the connection is closed without an answer");
    assert_eq!(get(&twin, "/v2/volumes")["meta"]["total"], json!(2), "the work was done");
    let limited = call(&twin, "GET", "/v2/account", &Value::Null);
    assert!(limited.status == 429 && limited.headers.contains("retry-after"), "{}", limited.headers);

    let id = create(&twin, "three", 1);
    twin.admin("POST", "faults", r#"["volumes.attach=errored","volumes.attach=no-device,after=1"]"#);
    assert_eq!(done(&twin, &id, &json!({"type": "attach", "droplet_id": 1})), "errored");
    assert_eq!(get(&twin, &format!("/v2/volumes/{id}"))["volume"]["droplet_ids"], json!([]));
    assert_eq!(done(&twin, &id, &json!({"type": "attach", "droplet_id": 1})), "completed");
    assert!(fs::symlink_metadata(link(&twin, "1", "three")).is_err(), "the device never appears");
    done(&twin, &id, &json!({"type": "detach", "droplet_id": 1}));
    twin.admin("POST", "faults", "volumes.attach=late-device:300ms\nvolumes.attach=other-name,after=1");
    done(&twin, &id, &json!({"type": "attach", "droplet_id": 1}));
    eventually("the device appears", || fs::metadata(link(&twin, "1", "three")).ok());
    done(&twin, &id, &json!({"type": "detach", "droplet_id": 1}));
    done(&twin, &id, &json!({"type": "attach", "droplet_id": 1}));
    assert!(twin.twin.devices_of("1").join("scsi-SDO_Volume_three").exists());

    let calls = twin.admin("GET", "calls", "");
    assert_eq!((&calls["calls"]["volumes.create"], &calls["throttled"]), (&json!(3), &json!(1)), "{calls}");
    let wrong = twin.send("POST", "/_twin/faults", "", "volumes.create=sideways").unwrap();
    assert!(wrong.status == 400 && wrong.text.contains("unknown effect"), "{}", wrong.text);
}

#[test]
fn the_rate_limit_is_told_and_kept() {
    let directory = Directory::new();
    let mut options = all(&directory);
    options.rate_limit = "3/h".parse().unwrap();
    let twin = Running::start(options);
    let answers: Vec<_> = (0..4).map(|_| call(&twin, "GET", "/v2/account", &Value::Null)).collect();
    assert_eq!(answers.iter().map(|answer| answer.status).collect::<Vec<_>>(), [200, 200, 200, 429]);
    assert!(
        answers[0].headers.contains("ratelimit-limit: 3")
            && answers[0].headers.contains("ratelimit-remaining: 2")
    );
    assert!(
        answers[3].headers.contains("ratelimit-remaining: 0")
            && answers[3].text.contains("too_many_requests")
    );
    assert!(answers[3].headers.contains("x-request-id"));
}

#[test]
fn a_killed_twin_goes_on_where_it_was() {
    let directory = Directory::new();
    let twin = start(&directory);
    let (kept, pending) = (create(&twin, "kept", 1), create(&twin, "pending", 1));
    done(&twin, &kept, &json!({"type": "attach", "droplet_id": 1}));
    let path = link(&twin, "1", "kept");
    let before = fs::read_link(&path).unwrap();
    twin.admin("PUT", "delays", r#"{"attach":"1s"}"#);
    assert_eq!(act(&twin, &pending, &json!({"type": "attach", "droplet_id": 2})).status, 202);
    twin.kill();
    // What a kill at another moment may leave behind.
    fs::write(directory.path().join("disks/unknown"), "x").unwrap();
    fs::write(directory.path().join("snapshots/unknown.new"), "x").unwrap();

    let twin = start(&directory);
    assert_eq!(fs::read_link(&path).unwrap(), before, "the device is the same");
    eventually("the action is carried out", || fs::metadata(link(&twin, "2", "pending")).ok());
    let names = |list: &str| fs::read_dir(directory.path().join(list)).unwrap().count();
    assert_eq!((names("disks"), names("snapshots")), (2, 0));
    drop(twin);
    assert!(fs::metadata(directory.path().join("cloud.json")).is_err());
    berth_cloud::purge(&directory.path()).unwrap();
    assert!(!directory.path().exists());
    let disks = directory.path().join("disks");
    assert_eq!(berth_host::loopdev::attached_below(&disks).unwrap(), []);
}

#[test]
fn a_call_that_hangs_is_carried_out_or_not_and_never_answered() {
    let directory = Directory::new();
    let twin = start(&directory);
    let address = twin.twin.url().strip_prefix("http://").unwrap().to_owned();
    for (effect, made) in [("hang-before", 0), ("hang-after", 1)] {
        twin.admin("POST", "faults", &format!("volumes.create={effect}"));
        let body = json!({"region": "nyc3", "name": effect, "size_gigabytes": 1}).to_string();
        let mut stream = TcpStream::connect(&address).unwrap();
        let length = body.len();
        let head = "POST /v2/volumes HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\ncontent-length:";
        write!(stream, "{head} {length}\r\n\r\n{body}").unwrap();
        eventually("the fault happens", || (twin.admin("GET", "faults", "")[0]["left"] == 0).then_some(()));
        eventually("the volume is made, or not", || {
            (get(&twin, "/v2/volumes")["meta"]["total"] == made).then_some(())
        });
        stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let read = stream.read(&mut [0]);
        assert_eq!(read.unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "{effect}");
        twin.admin("DELETE", "faults", "");
    }
}

#[test]
fn a_twin_is_found_at_the_same_address_again() {
    let directory = Directory::new();
    let twin = start(&directory);
    let url = twin.twin.url().to_owned();
    twin.kill();
    let twin = start(&directory);
    assert_eq!(twin.twin.url(), url);
    drop(twin);
    // Unless somebody else has taken it.
    let _other = std::net::TcpListener::bind(url.strip_prefix("http://").unwrap()).unwrap();
    assert_ne!(start(&directory).twin.url(), url);
}

#[test]
fn a_device_in_use_is_not_detached_unless_its_droplet_loses_power() {
    let directory = Directory::new();
    let twin = start(&directory);
    let id = create(&twin, "busy", 1);
    done(&twin, &id, &json!({"type": "attach", "droplet_id": 1}));
    let path = link(&twin, "1", "busy");
    let mut claim = OpenOptions::new();
    std::os::unix::fs::OpenOptionsExt::custom_flags(claim.read(true).write(true), 0o200);
    let user = claim.open(&path).unwrap();
    assert_eq!(done(&twin, &id, &json!({"type": "detach", "droplet_id": 1})), "errored");
    assert!(path.exists());
    twin.admin("PUT", "instances/1/power", r#"{"on":false}"#);
    assert_eq!(done(&twin, &id, &json!({"type": "detach", "droplet_id": 1})), "completed");
    assert_eq!(done(&twin, &id, &json!({"type": "attach", "droplet_id": 2})), "completed");
    assert!(fs::metadata(link(&twin, "2", "busy")).is_ok() && fs::symlink_metadata(&path).is_err());
    drop(user);
}

#[test]
fn the_metadata_service_knows_who_asks() {
    let directory = Directory::new();
    let twin = start(&directory);
    let text = |path: &str| twin.send("GET", path, "", "").unwrap().text;
    assert_eq!(text("/metadata/v1/id"), "1");
    assert_eq!(text("/_node/2/metadata/v1/id"), "2");
    assert_eq!(text("/_node/2/metadata/v1/region"), "nyc3");
    // As a client that takes the twin for its HTTP proxy asks.
    assert_eq!(text("http://169.254.169.254/metadata/v1/id"), "1");
    assert_eq!(twin.send("GET", "/_node/9/metadata/v1/id", "", "").unwrap().status, 404);
}

#[test]
fn tags_are_made_and_put_on_volumes() {
    let directory = Directory::new();
    let twin = start(&directory);
    let id = create(&twin, "tagged", 1);
    let resources = json!({"resources": [{"resource_id": id, "resource_type": "volume"}]});
    assert_eq!(call(&twin, "POST", "/v2/tags/k8s/resources", &resources).status, 404);
    assert_eq!(call(&twin, "POST", "/v2/tags", &json!({"name": "k8s"})).status, 201);
    assert_eq!(call(&twin, "POST", "/v2/tags/k8s/resources", &resources).status, 204);
    assert_eq!(get(&twin, &format!("/v2/volumes/{id}"))["volume"]["tags"], json!(["k8s"]));
    assert_eq!(get(&twin, "/v2/tags/k8s")["tag"]["resources"]["volumes"]["count"], json!(1));
}
