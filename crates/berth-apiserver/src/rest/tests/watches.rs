//! Watches: events in order, from any point, for as long as wanted.

use http_body_util::BodyExt;

use super::*;

struct Lines {
    body: Body,
    rest: Vec<u8>,
}

impl Lines {
    async fn open(api: &Api, path: &str) -> Self {
        let response = api.get_as(path, "application/json").await;
        assert_eq!(response.status(), 200);
        Self { body: response.into_body(), rest: Vec::new() }
    }

    /// The next event; `None` at the end.
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.rest.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                return Some(serde_json::from_slice(&line).unwrap());
            }
            let Some(frame) = self.body.frame().await else {
                assert!(self.rest.is_empty(), "the stream ended within a line");
                return None;
            };
            self.rest.extend_from_slice(&frame.unwrap().into_data().unwrap());
        }
    }

    async fn expect(&mut self, type_: &str, name: &str) -> Value {
        let event = self.next().await.unwrap();
        assert_eq!(
            (event["type"].as_str(), event["object"]["metadata"]["name"].as_str()),
            (Some(type_), Some(name))
        );
        event
    }
}

#[tokio::test]
async fn a_watch_begins_with_what_is_there_and_goes_on_with_what_happens() {
    let api = Api::new().await;
    api.post(CLAIMS, &claim("a")).await;
    let mut watch = Lines::open(&api, &format!("{CLAIMS}?watch=true")).await;
    watch.expect("ADDED", "a").await;
    api.post(CLAIMS, &claim("b")).await;
    watch.expect("ADDED", "b").await;
    api.merge(&format!("{CLAIMS}/b"), &json!({ "metadata": { "labels": { "x": "y" } } })).await;
    watch.expect("MODIFIED", "b").await;
    api.merge(&format!("{CLAIMS}/b"), &json!({ "metadata": { "finalizers": null } })).await;
    watch.expect("MODIFIED", "b").await;
    api.delete(&format!("{CLAIMS}/b")).await;
    let gone = watch.expect("DELETED", "b").await;
    assert!(gone["object"]["metadata"]["resourceVersion"].is_string());
}

#[tokio::test]
async fn a_watch_from_a_version_sees_everything_after_it() {
    let api = Api::new().await;
    let made = api.post(MAPS, &map("a")).await;
    api.post(MAPS, &map("b")).await;
    api.delete(&format!("{MAPS}/a")).await;
    let version = made["metadata"]["resourceVersion"].as_str().unwrap();
    let mut watch = Lines::open(&api, &format!("{MAPS}?watch=1&resourceVersion={version}")).await;
    watch.expect("ADDED", "b").await;
    watch.expect("DELETED", "a").await;
}

#[tokio::test]
async fn objects_come_and_go_as_selectors_say() {
    let api = Api::new().await;
    api.post(MAPS, &map("a")).await;
    let path = format!("{MAPS}/a");
    let mut watch =
        Lines::open(&api, &format!("{MAPS}?watch=1&labelSelector=on%3Dyes&fieldSelector=metadata.name%3Da"))
            .await;
    api.merge(&path, &json!({ "metadata": { "labels": { "on": "yes" } } })).await;
    watch.expect("ADDED", "a").await;
    api.merge(&path, &json!({ "data": { "a": "2" } })).await;
    watch.expect("MODIFIED", "a").await;
    api.merge(&path, &json!({ "metadata": { "labels": { "on": "no" } } })).await;
    watch.expect("DELETED", "a").await;
}

#[tokio::test]
async fn a_streamed_list_ends_with_a_bookmark() {
    let api = Api::new().await;
    api.post(MAPS, &map("a")).await;
    let query = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    let mut watch = Lines::open(&api, &format!("{MAPS}?{query}")).await;
    loop {
        let event = watch.next().await.unwrap();
        if event["type"] == "BOOKMARK" {
            assert_eq!(event["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"], "true");
            assert_eq!(event["object"]["kind"], "ConfigMap");
            break;
        }
        assert_eq!(event["type"], "ADDED");
    }
    let (code, _) = api.get(&format!("{MAPS}?watch=1&sendInitialEvents=true")).await;
    assert_eq!(code, 422);
}

#[tokio::test]
async fn a_watch_from_too_long_ago_says_so_and_ends() {
    let api = Api::with(store::Options { history_events: 2, ..store::Options::default() }).await;
    let made = api.post(MAPS, &map("a")).await;
    for index in 0..5 {
        api.post(MAPS, &map(&format!("m-{index}"))).await;
    }
    let version = made["metadata"]["resourceVersion"].as_str().unwrap();
    let mut watch = Lines::open(&api, &format!("{MAPS}?watch=1&resourceVersion={version}")).await;
    let event = watch.next().await.unwrap();
    assert_eq!((&event["type"], &event["object"]["code"]), (&json!("ERROR"), &json!(410)));
    assert_eq!(event["object"]["reason"], "Expired");
    assert_eq!(watch.next().await, None);
}

#[tokio::test(start_paused = true)]
async fn bookmarks_come_every_minute_and_before_the_end() {
    let api = Api::new().await;
    let (_, list) = api.get(MAPS).await;
    let version = list["metadata"]["resourceVersion"].as_str().unwrap();
    let begun = tokio::time::Instant::now();
    let path =
        format!("{MAPS}?watch=1&resourceVersion={version}&allowWatchBookmarks=true&timeoutSeconds=100");
    let mut watch = Lines::open(&api, &path).await;
    let mut times = Vec::new();
    while let Some(event) = watch.next().await {
        assert_eq!(event["type"], "BOOKMARK");
        assert!(event["object"]["metadata"]["resourceVersion"].is_string());
        times.push(begun.elapsed().as_secs());
    }
    assert_eq!(times, [60, 98]);
    assert_eq!(begun.elapsed().as_secs(), 100);
}

#[tokio::test]
async fn a_table_watch_names_its_columns_once() {
    let api = Api::new().await;
    api.post(CLAIMS, &claim("a")).await;
    api.post(CLAIMS, &claim("b")).await;
    let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
    let response = api.get_as(&format!("{CLAIMS}?watch=1"), table).await;
    let mut watch = Lines { body: response.into_body(), rest: Vec::new() };
    let first = watch.next().await.unwrap();
    assert!(first["object"]["columnDefinitions"].is_array(), "{first}");
    assert_eq!(watch.next().await.unwrap()["object"]["columnDefinitions"], Value::Null);
}

#[tokio::test]
async fn shutting_down_ends_all_watches() {
    let api = Api::new().await;
    let mut watch = Lines::open(&api, &format!("{CLAIMS}?watch=1")).await;
    api.server.inner.options.shutdown.cancel();
    assert_eq!(watch.next().await, None);
}

#[tokio::test]
async fn a_watch_may_want_to_go_on_for_ever() {
    let api = Api::new().await;
    api.post(MAPS, &map("a")).await;
    let path = format!("{MAPS}?watch=1&fieldSelector=metadata.name%3Da&timeoutSeconds={}", i64::MAX);
    Lines::open(&api, &path).await.expect("ADDED", "a").await;
}
