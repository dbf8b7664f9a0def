// Program hostpath stands in for csi-driver-host-path in the pods of the suite's mock driver.
//
// With -proxy-endpoint=tcp://:PORT each connection to the CSI socket is joined with one to that port, on which the suite
// answers the calls itself. Without, it becomes Berth's local driver, which takes the same flags.
package main

import (
	"io"
	"log"
	"net"
	"os"
	"strings"
	"syscall"
)

func main() {
	socket, port := "", ""
	for _, word := range os.Args[1:] {
		name, value, _ := strings.Cut(strings.TrimLeft(word, "-"), "=")
		switch name {
		case "endpoint":
			socket = "/" + strings.TrimLeft(strings.TrimPrefix(value, "unix:"), "/")
		case "proxy-endpoint":
			port = strings.TrimPrefix(value, "tcp://")
		}
	}
	if port == "" {
		words := append([]string{"/berth", "driver", "local"}, os.Args[1:]...)
		log.Fatal(syscall.Exec("/berth", words, os.Environ()))
	}
	os.Remove(socket)
	callers, err := net.Listen("unix", socket)
	if err != nil {
		log.Fatal(err)
	}
	answerers, err := net.Listen("tcp", port)
	if err != nil {
		log.Fatal(err)
	}
	for {
		caller, err := callers.Accept()
		if err != nil {
			log.Fatal(err)
		}
		answerer, err := answerers.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go join(caller, answerer)
	}
}

// join copies both ways until one side closes, and then closes the other.
func join(one, other net.Conn) {
	done := make(chan struct{}, 2)
	copy := func(to, from net.Conn) {
		io.Copy(to, from)
		done <- struct{}{}
	}
	go copy(one, other)
	go copy(other, one)
	<-done
	one.Close()
	other.Close()
}
