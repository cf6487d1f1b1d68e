"""duetto"""
