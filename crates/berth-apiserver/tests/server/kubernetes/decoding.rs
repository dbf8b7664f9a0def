//! Strict decoding: the same objects, unknown and duplicate fields, and messages.

use berth_apiserver::schema::{built_in, decode, json};
use berth_core::Quantity;

use super::peer::{about, ask};

const CASES: [(&str, &str); 23] = [
    ("Pod", r#"{"metadata":{"name":"a"},"spec":{"containers":[{"name":"c","image":"i"}]}}"#),
    ("Pod", r#"{"spec":{"containers":[{"name":"c","x":1,"ports":[{"containerPort":80,"y":{}}]}],"z":null}}"#),
    ("Pod", r#"{"spec":{"a":1,"volumes":[{"name":"v","emptyDir":{"b":1}},{"name":"w","hostPath":null}]}}"#),
    ("Pod", r#"{"spec":{"nodeName":"a","nodeName":"b","containers":[{"name":"c","name":"d"}]}}"#),
    ("Pod", r#"{"metadata":{"labels":{"a":"1","a":"2"}},"unknown":{"x":{"x":1,"x":2}}}"#),
    ("Pod", r#"{"xx":1,"xx":2,"spec":{"containers":[],"containers":[{"name":"a","a":1}]}}"#),
    ("Pod", r#"{"spec":{"containers":null,"hostNetwork":false,"activeDeadlineSeconds":0,"tolerations":[]}}"#),
    ("Pod", r#"{"spec":{"containers":[{"name":5}]}}"#),
    ("Pod", r#"{"spec":{"containers":{"name":"a"}}}"#),
    ("Pod", r#"{"spec":{"containers":[{"name":"a","ports":[{"containerPort":"80"}]}]}}"#),
    ("Pod", r#"{"spec":{"containers":[{"name":"a","livenessProbe":{"httpGet":{"port":"http"}}}]}}"#),
    ("Pod", r#"{"spec":{"terminationGracePeriodSeconds":1.5}}"#),
    ("Pod", r#"{"spec":{"containers":[{"resources":{"limits":{"cpu":1,"memory":"0.5Gi"}}}]}}"#),
    ("PersistentVolumeClaim", r#"{"spec":{"storageClassName":"","volumeName":"","accessModes":[]}}"#),
    ("PersistentVolumeClaim", r#"{"spec":{"resources":{"requests":{"storage":"many"}}}}"#),
    ("PersistentVolumeClaim", r#"{"spec":{"resources":{"requests":{"storage":null}}}}"#),
    ("PersistentVolumeClaim", r#"{"metadata":{"creationTimestamp":"2020-01-01T02:00:00.5+02:00"}}"#),
    ("PersistentVolumeClaim", r#"{"metadata":{"labels":{"a":null},"annotations":{},"finalizers":[null]}}"#),
    ("PersistentVolumeClaim", r#"{"status":{"conditions":[{"type":"a"},null]}}"#),
    ("PersistentVolume", r#"{"spec":{"csi":{"driver":"d","volumeHandle":"h","nope":1},"capacity":{}}}"#),
    ("ConfigMap", r#"{"data":{"a":1}}"#),
    ("Secret", r#"{"data":{"a":"aGk=","b":""},"stringData":{"c":"d"},"immutable":false}"#),
    ("Event", r#"{"involvedObject":{"kind":"Pod"},"count":0}"#),
];

#[test]
fn objects_are_decoded_as_go_decodes_them() {
    for (kind, text) in CASES {
        let mut question = about("normalize", ("", "v1", kind));
        question["text"] = text.into();
        let theirs = ask(&question);
        let type_ = built_in("", "v1", kind).unwrap();
        let mut ours = json::parse(text.as_bytes()).unwrap();
        let decoded = decode(&type_, &mut ours.value);
        if let Some(error) = theirs["error"].as_str() {
            let first = decoded.errors.first().map(String::as_str).unwrap_or_default();
            assert_eq!(shortened(first), shortened(error), "{text}");
            continue;
        }
        assert_eq!(decoded.errors, Vec::<String>::new(), "{text}");
        assert_eq!(ours.value, theirs["object"], "{text}");
        let mut found = decoded.strict(&ours.duplicates);
        let mut expected: Vec<String> = theirs["strict"]
            .as_array()
            .map(|all| all.iter().filter_map(|text| text.as_str().map(str::to_owned)).collect())
            .unwrap_or_default();
        found.sort();
        expected.sort();
        assert_eq!(found, expected, "{text}");
    }
}

/// A message without the Go type at its end, whose named forms the table does not know.
fn shortened(message: &str) -> &str {
    message.rsplit_once(" of type ").map_or(message, |(start, _)| start)
}

#[test]
fn quantities_are_read_as_go_reads_them() {
    let numbers = [
        "0",
        "1",
        "10",
        "1024",
        "1000",
        "1500",
        "0.5",
        "1.25",
        ".1",
        "1.",
        "-3",
        "+4",
        "999999999999",
        "12345678901234567890",
        "0.0000000001",
        "1..2",
        "",
        "x",
        "1.5e3",
        ".",
    ];
    let units = [
        "", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei", "e3", "E-2",
        "e", "K", "gi", "GB", "kk",
    ];
    // Beyond the largest unit Go's own text is wrong: 1000E becomes 1.
    // And of what is beyond all measure, our text is.
    let sane = |text: &String| {
        let huge = text.starts_with("1234567") && text.ends_with(['k', 'M', 'G', 'T', 'P', '3']);
        !huge && (!text.ends_with('E') || text.len() <= 4 && !text.starts_with("10"))
    };
    let texts = numbers.iter().flat_map(|number| units.iter().map(move |unit| format!("{number}{unit}")));
    for text in texts.filter(sane) {
        let theirs = ask(&serde_json::json!({"op": "quantity", "text": text}));
        match Quantity::canonical(&text) {
            Ok(ours) => assert_eq!(Some(ours.as_str()), theirs["text"].as_str(), "{text}: {theirs}"),
            Err(error) => {
                assert_eq!(Some(error.to_string().as_str()), theirs["error"].as_str(), "{text}: {theirs}");
            }
        }
    }
}
